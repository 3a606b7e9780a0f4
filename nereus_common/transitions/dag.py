"""A transition as a value: a DAG of primitives over the units of two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.plan import Plan


class Primitive(StrEnum):
    """What happens to units, as in the paper's §5.2. All but DESTROY make new units."""

    SPLIT = "split"
    """A unit's layout is taken apart into a smaller one: tp2 → tp1. Each new rank holds what several old ones held."""
    MERGE = "merge"
    """Units become the parts of a larger layout: tp1 → tp2. Each new rank holds a part of what an old one held."""
    RESHARD = "reshard"
    """Directly between layouts neither of which is made of the other: a fused Split and Merge."""
    EXTEND = "extend"
    """A further unit of a layout that exists already: a copy."""
    DESTROY = "destroy"
    """A unit ends and its devices are free."""


class Mode(StrEnum):
    SHADOW = "shadow"
    """The new state is built beside the old one, which stays whole until the commit."""
    IN_PLACE = "in-place"
    """Training, inference: bucket by bucket; what a bucket replaces is released before the next one is allocated.
    Generation: sleep-first; the old units give up weights and KV cache, their processes stay until they end."""


class Side(StrEnum):
    OLD = "old"
    NEW = "new"


class PerDevice(Mapping[DeviceId, int]):
    """Bytes per device as two columns. The dictionary is made when it is first asked: a plan for a thousand devices
    carries many of these, and reads few."""

    __slots__ = ("_amounts", "_devices", "_known")

    def __init__(self, devices: Sequence[DeviceId] = (), amounts: Sequence[int] = ()) -> None:
        self._devices, self._amounts = devices, amounts
        self._known: dict[DeviceId, int] | None = None

    @property
    def _table(self) -> dict[DeviceId, int]:
        if self._known is None:
            self._known = dict(zip(self._devices, map(int, self._amounts), strict=True))
        return self._known

    def __getitem__(self, device: DeviceId) -> int:
        return self._table[device]

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def __repr__(self) -> str:
        return repr(self._table)


NOTHING: Final = PerDevice()


class UnitSlot(NamedTuple):
    """A unit of one of the two plans, written `actor/training.new.r0`."""

    model_stage: ModelStage
    side: Side
    replica: int

    def __str__(self) -> str:
        return f"{self.model_stage}.{self.side}.r{self.replica}"


class Node(NamedTuple):
    """One primitive. `sources`: units whose state it reads, none of which ends before it is done; of a Destroy the
    unit that ends. `targets`: new units that it makes.

    Sources are old units, or, where those had to end first, a new one that an earlier node made. An in-place node
    consumes its old sources: it drops them tensor by tensor, or puts them to sleep. No sources: the unit is filled by
    its model's weight sync.

    `acquires`, `frees`: bytes per device, the latter of an in-place node the bytes of the units it consumes.
    `moved`: bytes that the targets' ranks receive.
    """

    id: int
    primitive: Primitive
    model_stage: ModelStage
    sources: tuple[UnitSlot, ...]
    targets: tuple[UnitSlot, ...] = ()
    mode: Mode = Mode.SHADOW
    acquires: Mapping[DeviceId, int] = NOTHING
    frees: Mapping[DeviceId, int] = NOTHING
    moved: int = 0


class EdgeKind(StrEnum):
    DATA = "data"
    """A holder is not released before its reader is done."""
    RESOURCE = "resource"
    """Bytes that one node frees are what another acquires."""


class Edge(NamedTuple):
    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class TransitionDag:
    """`nodes` are in a topological order, their ids are their places in it. Training units of a model-stage meet in
    one group, so one node makes all of them. `kept`: units that stay as they are, old slot → new slot.

    `peaks`: the most bytes in use on each device at any point of any order that the edges allow, of `budgets`.
    A Destroy that no node waits for may as well run after the commit, so that an abort finds its unit whole.
    """

    old: Plan
    new: Plan
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    kept: Mapping[UnitSlot, UnitSlot]
    peaks: Mapping[DeviceId, int]
    budgets: Mapping[DeviceId, int]

    @property
    def moved(self) -> int:
        return sum(node.moved for node in self.nodes)

    def before(self, node: int) -> tuple[int, ...]:
        """The ids of the nodes that `node` waits for."""
        return tuple(edge.before for edge in self.edges if edge.after == node)
