"""What a cluster is made of: processors with their nominal peaks, nodes of equal devices, and the links between them.

Nominal: what a job achieves of it is learned while the job runs. All rates are bytes per second in one direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import DeviceId

GB = 10**9
TERA = 10**12
CPU = "cpu"
"""The name of a processor that is no accelerator, and the kind of its devices."""


class Link(StrEnum):
    """The way between two devices: its class, and how near."""

    DEVICE = "device"
    """None: they are the same."""
    NODE = "node"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Processor:
    """One device. `flops`: peak operations per second by dtype, dense; a dtype that is not there runs at float32's.
    `memory_rate`: of its own memory."""

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_rate: float

    def peak(self, dtype: str) -> float:
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True, slots=True)
class NodeKind:
    """`devices` of one kind. `inside`: rate of a device to the others of its node; `outside`: of the whole node to all
    other nodes, which its devices share."""

    processor: Processor
    devices: int
    inside: float
    outside: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` by name. `budgets`: bytes of a device that may be used, where that is not all of its memory.

    Devices are called gpu0, gpu1, …; of a processor called cpu: cpu0, cpu1, …
    """

    nodes: Mapping[str, NodeKind]
    budgets: Mapping[DeviceId, int] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(
            DeviceId(node, f"{slot_of(kind.processor)}{number}")
            for node, kind in self.nodes.items()
            for number in range(kind.devices)
        )

    def kind(self, device: DeviceId) -> NodeKind:
        """NotFound names a device that is not of this cluster."""
        kind = self.nodes.get(device.node)
        number = device.slot.removeprefix(slot_of(kind.processor)) if kind else ""
        if kind is None or not number.isdigit() or int(number) >= kind.devices:
            raise NotFound(
                f"the cluster has no device {device}", remedy="see its nodes", field="devices", device=device
            )
        return kind

    def budget(self, device: DeviceId) -> int:
        return self.budgets.get(device, self.kind(device).processor.memory_bytes)

    def link(self, devices: Iterable[DeviceId]) -> Link:
        """The furthest way between any two of these."""
        found = set(devices)
        if len({device.node for device in found}) > 1:
            return Link.NETWORK
        return Link.NODE if len(found) > 1 else Link.DEVICE

    def rate(self, device: DeviceId, link: Link, sharing: int = 1) -> float:
        """Of one device over a link of this kind, when `sharing` devices of its node use it at once."""
        kind = self.kind(device)
        if link is Link.DEVICE:
            return kind.processor.memory_rate
        return kind.inside if link is Link.NODE else min(kind.inside, kind.outside / sharing)


def slot_of(processor: Processor) -> str:
    """How the slots of its devices are called, before their numbers."""
    return CPU if processor.name == CPU else "gpu"


def _gpu(name: str, half: float, single: float, gigabytes: float, memory: float) -> Processor:
    """`half`, `single`: TFLOP/s of 16-bit and 32-bit products; `memory` in GB/s."""
    flops = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return Processor(name, MappingProxyType(flops), int(gigabytes * GB), memory * GB)


def _node(processor: Processor, devices: int, inside: float, outside: float) -> NodeKind:
    """`inside`, `outside` in GB/s."""
    return NodeKind(processor, devices, inside * GB, outside * GB)


NODES: Mapping[str, NodeKind] = MappingProxyType(
    {
        "a100-80": _node(_gpu("a100-80", 312, 19.5, 80, 2039), 8, 300, 200),
        "a100-64": _node(_gpu("a100-64", 312, 19.5, 64, 1640), 4, 300, 50),
        "h100": _node(_gpu("h100", 989, 67, 80, 3350), 8, 450, 400),
        "h200": _node(_gpu("h200", 989, 67, 141, 4800), 8, 450, 400),
        "h20": _node(_gpu("h20", 148, 44, 96, 4000), 8, 450, 200),
        "mi250x": _node(_gpu("mi250x", 191.5, 23.9, 64, 1638), 8, 50, 100),
        "v100-16": _node(_gpu("v100-16", 125, 15.7, 16, 900), 1, 150, 1.25),
        "l40s": _node(_gpu("l40s", 362, 91.6, 48, 864), 8, 32, 25),
        "b200": _node(_gpu("b200", 2250, 75, 180, 8000), 8, 900, 400),
        "gb200": _node(_gpu("gb200", 2500, 80, 186, 8000), 4, 900, 200),
        "a10g": _node(_gpu("a10g", 70, 31.2, 24, 600), 8, 32, 12.5),
    }
)
"""Usual servers by their makers' data sheets: what a node of a cluster file may be called. MI250X counts by half cards,
whose links differ: the slower ones are meant. V100 has no bfloat16 units: it is given its float16 peak."""


def cluster_of(name: str, nodes: int) -> Cluster:
    """`nodes` usual servers of one kind; InvalidInput names the kinds there are."""
    if name not in NODES:
        raise InvalidInput(
            f"there is no node kind {name!r}", remedy=f"one of {', '.join(sorted(NODES))}", field="nodes.kind"
        )
    if nodes < 1:
        raise InvalidInput(f"a cluster of {nodes} nodes", remedy="at least one", field="nodes.count")
    return Cluster({f"node{number}": NODES[name] for number in range(nodes)})
