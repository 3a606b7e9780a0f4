"""The DAG while it is being built: nodes in the order in which they were placed, which is a topological one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus_common.transitions.change import Change
from nereus_common.transitions.dag import NOTHING, Edge, EdgeKind, Mode, Node, PerDevice, Primitive
from nereus_common.transitions.local import primitive_between


class Drafts:
    """Nodes so far, and whom each waits for: nodes that are there already, so there is no cycle. Units by number.

    `ends`: old unit → its Destroy.
    """

    def __init__(self, changes: Sequence[Change], layers: Mapping[str, int]) -> None:
        self.nodes: list[Node] = []
        self.ends: dict[int, int] = {}
        self._needs: list[Sequence[int]] = []
        self._waits: list[Sequence[int]] = []
        self._slots = [slot for change in changes for slot in (*change.old.slots, *change.new.slots)]
        self._primitives = [
            primitive_between(change.old.plan.layout, change.new.plan.layout, layers.get(change.model_stage.model))
            for change in changes
        ]
        self._readers: dict[int, list[int]] = {}
        self._made: dict[int, int] = {}

    def make(
        self,
        change: Change,
        replicas: Sequence[int],
        sources: Sequence[int],
        mode: Mode = Mode.SHADOW,
        frees: PerDevice = NOTHING,
    ) -> int:
        """A node that makes new units `replicas`."""
        new, number = change.new, len(self.nodes)
        ranks = new.plan.layout.ranks
        start, stop = replicas[0] * ranks, (replicas[-1] + 1) * ranks
        self.nodes.append(
            Node(
                number,
                self._primitives[change.row],
                change.model_stage,
                tuple([self._slots[source] for source in sources]),
                tuple([new.slots[replica] for replica in replicas]),
                mode,
                PerDevice(new.plan.devices[start:stop], new.totals * len(replicas)),
                frees,
                new.unit_state * len(replicas),
            )
        )
        self._waits.append(())
        needs: list[int] = []
        for source in sources:
            readers = self._readers.setdefault(source, [])
            if source in self._made:
                needs.append(self._made[source])
            if mode is Mode.IN_PLACE:
                needs += readers  # they are done before it is dropped
            readers.append(number)
        self._needs.append(needs)
        for replica in replicas:
            self._made[new.first + replica] = number
        return number

    def wait(self, number: int, waits: Sequence[int]) -> None:
        """Node `number` takes bytes that nodes `waits` free."""
        self._waits[number] = waits

    def end(self, change: Change, unit: int, left: Sequence[int]) -> int:
        """The Destroy of old `unit`, which frees `left` bytes, by rank, after everyone who reads it."""
        number = self.ends[unit] = len(self.nodes)
        frees = PerDevice(change.old.plan.unit_devices(unit - change.old.first), left)
        self.nodes.append(
            Node(number, Primitive.DESTROY, change.model_stage, (self._slots[unit],), (), Mode.SHADOW, NOTHING, frees)
        )
        self._needs.append(self._readers.get(unit, ()))
        self._waits.append(())
        return number

    def edges(self) -> tuple[Edge, ...]:
        """What a node waits for on both counts is a data edge."""
        data, resource = EdgeKind.DATA, EdgeKind.RESOURCE
        found: list[Edge] = []
        for number, (needs, waits) in enumerate(zip(self._needs, self._waits, strict=True)):
            if needs:
                found += [Edge(before, number, data) for before in dict.fromkeys(needs)]
            if waits:
                found += [Edge(before, number, resource) for before in dict.fromkeys(waits) if before not in needs]
        return tuple(found)
