"""The DAG while it is being built: nodes in the order in which they were placed, which is a topological one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from nereus_common.core.ids import ModelStage
from nereus_common.transitions.change import Change
from nereus_common.transitions.dag import Edge, EdgeKind, Mode, Node, PerDevice, Primitive, UnitSlot
from nereus_common.transitions.local import primitive_between


class Drafts:
    """Nodes and edges so far. Every edge goes from a node that is there already, so there is no cycle."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        self.nodes: list[Node] = []
        self._edges: dict[tuple[int, int], EdgeKind] = {}
        self._layers = layers
        self._primitives: dict[ModelStage, Primitive] = {}
        self._readers: dict[UnitSlot, list[int]] = {}
        self._made: dict[UnitSlot, int] = {}
        self.ends: dict[UnitSlot, int] = {}

    def readers(self, slot: UnitSlot) -> Sequence[int]:
        return self._readers.get(slot, ())

    def make(
        self,
        change: Change,
        replicas: Sequence[int],
        sources: tuple[UnitSlot, ...],
        waits: Iterable[int] = (),
        mode: Mode = Mode.SHADOW,
        frees: PerDevice | None = None,
    ) -> int:
        """A node that makes new units `replicas`."""
        new, number = change.new, len(self.nodes)
        devices = tuple(chain.from_iterable(new.plan.unit_devices(replica) for replica in replicas))
        node = Node(
            number,
            self._primitive(change),
            change.model_stage,
            sources,
            tuple(new.slots[replica] for replica in replicas),
            mode,
            PerDevice(devices, new.totals * len(replicas)),
            frees or _NOTHING,
            new.unit_state * len(replicas),
        )
        self.nodes.append(node)
        for source in sources:
            if source in self._made:
                self._edges[self._made[source], number] = EdgeKind.DATA
            if mode is Mode.IN_PLACE:
                self._edges.update(((reader, number), EdgeKind.DATA) for reader in self.readers(source))
            self._readers.setdefault(source, []).append(number)
        for target in node.targets:
            self._made[target] = number
        for wait in waits:
            self._edges.setdefault((wait, number), EdgeKind.RESOURCE)
        return number

    def _primitive(self, change: Change) -> Primitive:
        name = change.model_stage
        if name not in self._primitives:
            layers = self._layers.get(name.model)
            self._primitives[name] = primitive_between(change.old.plan.layout, change.new.plan.layout, layers)
        return self._primitives[name]

    def end(self, change: Change, replica: int, frees: PerDevice) -> int:
        """The Destroy of old unit `replica`, after everyone who reads it."""
        slot = change.old.slots[replica]
        number = self.ends[slot] = len(self.nodes)
        self.nodes.append(Node(number, Primitive.DESTROY, change.model_stage, (slot,), frees=frees))
        self._edges.update(((reader, number), EdgeKind.DATA) for reader in self.readers(slot))
        return number

    def edges(self) -> tuple[Edge, ...]:
        return tuple(Edge(before, after, kind) for (before, after), kind in self._edges.items())


_NOTHING: PerDevice = PerDevice((), ())
