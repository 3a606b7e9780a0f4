"""The devices of a running cluster, as a `Cluster` that can be planned for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId
from nereus_common.planning.hardware import CPU, GB, NODES, TERA, Cluster, NodeKind, Processor, slot_of

CPU_FLOPS = MappingProxyType({"float32": 0.2 * TERA, "bfloat16": 1 * TERA})
CPU_MEMORY_RATE, CPU_LINK = 10 * GB, 1 * GB
"""Of all cores of a node together; a first guess, which the running job corrects."""


class Registered(Protocol):
    """A device of the pool. `kind`: "cpu", or what the driver calls it."""

    @property
    def id(self) -> DeviceId: ...
    @property
    def kind(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...


def cluster_from(devices: Iterable[Registered], occupied: Mapping[DeviceId, int]) -> Cluster:
    """`occupied`: bytes that others have. InvalidInput names a device whose kind is not known."""
    known = tuple(devices)
    slots: dict[str, int] = {}
    kinds: dict[str, NodeKind] = {}
    for device in known:
        kind = _kind(device)
        prefix = slot_of(kind.processor)
        number = device.id.slot.removeprefix(prefix)
        if not number.isdigit():
            raise InvalidInput(
                f"device {device.id} is not called {prefix} and a number",
                remedy="name devices gpu0, gpu1 … or cpu0, cpu1 …",
                field="devices",
                device=device.id,
            )
        slots[device.id.node] = max(slots.get(device.id.node, 0), int(number) + 1)
        kinds[device.id.node] = kind
    nodes = {
        node: NodeKind(kind.processor, slots[node], kind.inside, kind.outside) for node, kind in sorted(kinds.items())
    }
    budgets = {device.id: max(device.memory_bytes - occupied.get(device.id, 0), 0) for device in known}
    return Cluster(nodes, budgets)


def _kind(device: Registered) -> NodeKind:
    if device.kind == CPU:
        return NodeKind(Processor(CPU, CPU_FLOPS, device.memory_bytes, CPU_MEMORY_RATE), 1, CPU_LINK, CPU_LINK)
    words = device.kind.lower().replace(" ", "-")
    for name in sorted(NODES, key=len, reverse=True):
        if name in words or name.partition("-")[0] in words.split("-"):
            return NODES[name]
    raise InvalidInput(
        f"device {device.id} is a {device.kind!r}, of which nothing is known",
        remedy=f"plan by hand, or use one of {', '.join(sorted(NODES))}",
        field="devices",
        device=device.id,
    )
