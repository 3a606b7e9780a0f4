"""The devices that a job may use, in pools of equal nodes, and where on them groups of model-stages stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from nereus_common.core.ids import DeviceId
from nereus_common.planning.hardware import Cluster, NodeKind
from nereus_common.planning.space import Pool

HEADROOM = 0.1
"""The share of a device's budget that a plan leaves free."""
Devices = tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class NodePool:
    """`nodes`: usable devices by node, as many on each. `budget`: bytes that may be planned with on every device."""

    kind: NodeKind
    nodes: tuple[Devices, ...]
    budget: float

    @property
    def pool(self) -> Pool:
        """As placements are counted on it."""
        return Pool(replace(self.kind, devices=len(self.nodes[0])), self.size)

    @property
    def size(self) -> int:
        return len(self.nodes) * len(self.nodes[0])


def node_pools(cluster: Cluster, usable: Collection[DeviceId]) -> tuple[NodePool, ...]:
    """Nodes with as many usable devices of one kind, and as much memory on each, are a pool."""
    pools: dict[tuple[str, int, int], tuple[NodeKind, list[Devices]]] = {}
    for node, devices in _by_node(usable).items():
        kind = cluster.kind(devices[0])
        key = kind.processor.name, len(devices), min(map(cluster.budget, devices))
        pools.setdefault(key, (cluster.nodes[node], []))[1].append(devices)
    return tuple(
        NodePool(kind, tuple(nodes), (1 - HEADROOM) * budget) for (_, _, budget), (kind, nodes) in pools.items()
    )


def _by_node(devices: Iterable[DeviceId]) -> dict[str, Devices]:
    found: dict[str, list[DeviceId]] = {}
    for device in sorted(devices):
        found.setdefault(device.node, []).append(device)
    return {node: tuple(ones) for node, ones in found.items()}


@dataclass(frozen=True, slots=True)
class Block:
    """A group's `size` devices, `preferred` where they are free: those that it stands on now."""

    size: int
    preferred: frozenset[DeviceId]


def settle(nodes: Sequence[Devices], blocks: Sequence[Block]) -> list[Devices] | None:
    """Disjoint devices for each block, whole nodes for those of a node or more, so that no smaller one crosses nodes;
    None where the rest of no node is large enough."""
    free = list(nodes)
    found: dict[int, Devices] = {}
    for number in sorted(range(len(blocks)), key=lambda one: -blocks[one].size):
        taken = _take(free, len(nodes[0]), blocks[number])
        if taken is None:
            return None
        found[number] = taken
        gone = set(taken)
        free = [tuple(device for device in node if device not in gone) for node in free]
    return [found[number] for number in range(len(blocks))]


def _take(free: Sequence[Devices], width: int, block: Block) -> Devices | None:
    def foreign(node: Devices) -> int:
        return -sum(device in block.preferred for device in node)

    if block.size >= width:
        whole = sorted((node for node in free if len(node) == width), key=foreign)[: -(-block.size // width)]
        devices = tuple(device for node in sorted(whole) for device in node)[: block.size]
        return devices if len(devices) == block.size else None
    roomy = [node for node in free if len(node) >= block.size]
    if not roomy:
        return None
    node = min(roomy, key=lambda one: (foreign(one), len(one)))
    chosen = sorted(node, key=lambda device: device not in block.preferred)[: block.size]
    return tuple(sorted(chosen))
