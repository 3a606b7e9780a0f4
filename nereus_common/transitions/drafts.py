"""The DAG while it is being built: nodes in the order in which they were placed, which is a topological one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nereus_common.transitions.change import Change
from nereus_common.transitions.dag import Edge, EdgeKind, Mode, Node, PerDevice, Primitive
from nereus_common.transitions.local import primitive_between


class Drafts:
    """Nodes so far, and whom each waits for: nodes that are there already, so there is no cycle. Units by number.

    `ends`: old unit → its Destroy.
    """

    def __init__(self, changes: Sequence[Change], layers: Mapping[str, int]) -> None:
        self.nodes: list[Node] = []
        self.ends: dict[int, int] = {}
        self._data: list[Sequence[int]] = []
        self._waits: dict[int, Sequence[int]] = {}
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
        frees: PerDevice | None = None,
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
                frees or _NOTHING,
                new.unit_state * len(replicas),
            )
        )
        self._data.append([before for source in sources for before in self._before(source, mode)])
        for source in sources:
            self._readers.setdefault(source, []).append(number)
        for replica in replicas:
            self._made[new.first + replica] = number
        return number

    def _before(self, source: int, mode: Mode) -> Iterator[int]:
        """Whom the reader of `source` comes after: its maker and, where it is consumed, all others who read it."""
        if source in self._made:
            yield self._made[source]
        if mode is Mode.IN_PLACE:
            yield from self._readers.get(source, ())

    def wait(self, number: int, waits: Sequence[int]) -> None:
        """Node `number` takes bytes that nodes `waits` free."""
        self._waits[number] = waits

    def end(self, change: Change, unit: int, left: Sequence[int]) -> int:
        """The Destroy of old `unit`, which frees `left` bytes, by rank, after everyone who reads it."""
        number = self.ends[unit] = len(self.nodes)
        frees = PerDevice(change.old.plan.unit_devices(unit - change.old.first), left)
        self.nodes.append(Node(number, Primitive.DESTROY, change.model_stage, (self._slots[unit],), frees=frees))
        self._data.append(self._readers.get(unit, ()))
        return number

    def edges(self) -> tuple[Edge, ...]:
        found: list[Edge] = []
        for number, data in enumerate(self._data):
            kinds = dict.fromkeys(data, EdgeKind.DATA)
            for wait in self._waits.get(number, ()):
                kinds.setdefault(wait, EdgeKind.RESOURCE)
            found += [Edge(before, number, kind) for before, kind in kinds.items()]
        return tuple(found)


_NOTHING: PerDevice = PerDevice((), ())
