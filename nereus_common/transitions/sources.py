"""Who holds the state of each model-stage while nodes are placed, and which old unit may end without losing it.

The law behind `may_end`: the first node placed in a model-stage reads an old unit (or one that is kept), whose end
waits for it. So when all old units have ended, a new one is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.transitions.change import Change, Column
from nereus_common.transitions.dag import UnitSlot


@dataclass(frozen=True, slots=True, eq=False)
class OldUnit:
    """A unit of the old plan that ends; there is one object of it. `ranks`: device number → rank."""

    change: Change
    replica: int
    slot: UnitSlot
    ranks: Mapping[int, int]

    @classmethod
    def of(cls, change: Change, replica: int, places: Sequence[int]) -> OldUnit:
        ranks = dict(zip(places, range(len(places)), strict=True))
        return cls(change, replica, change.old.slots[replica], ranks)


class Holders:
    """`consumed`: old units that an in-place node has dropped or put to sleep, with the bytes given up per place."""

    def __init__(self, changes: Sequence[Change], devices: int) -> None:
        self._changes = changes
        self.consumed: dict[OldUnit, dict[int, int]] = {}
        self.units: dict[ModelStage, list[OldUnit]] = {}
        self._ended: set[OldUnit] = set()
        self._made: dict[ModelStage, list[UnitSlot]] = {change.model_stage: [] for change in changes}
        self._intact: dict[ModelStage, dict[OldUnit, None]] = {}
        self._on: list[list[OldUnit]] = [[] for _ in range(devices)]
        for change in changes:
            rows = change.old.places.tolist()
            units = [OldUnit.of(change, replica, rows[replica]) for replica in change.ending]
            self.units[change.model_stage] = units
            self._intact[change.model_stage] = dict.fromkeys(units)
            for unit in units:
                for place in unit.ranks:
                    self._on[place].append(unit)

    def on(self, place: int) -> Sequence[OldUnit]:
        """Units whose bytes still count on `place`, in the order in which they are asked to end."""
        return self._on[place]

    def amount(self, unit: OldUnit, place: int) -> int:
        """The bytes that the end of `unit` frees on `place`."""
        size = unit.change.old.totals[unit.ranks[place]]
        return size - self.consumed[unit].get(place, 0) if unit in self.consumed else size

    def may_end(self, unit: OldUnit, ends: Mapping[OldUnit, None]) -> bool:
        """Whether its state has another holder when it ends, together with `ends`."""
        change = unit.change
        intact = self._intact[change.model_stage]
        if not change.holds_alone or unit not in intact or change.kept or self._made[change.model_stage]:
            return True
        return any(other is not unit and other not in ends for other in intact)

    def sources(self, change: Change, replica: int) -> tuple[UnitSlot, ...]:
        """Whom new unit `replica` is filled from: of training everyone, else the unit in its place, or each in turn."""
        if not change.holds_alone:
            return ()
        intact = self._intact[change.model_stage]
        if change.stage is Stage.TRAINING:
            return tuple(unit.slot for unit in intact)
        here = self._here(change, int(change.new.places[replica, 0]))
        if here is not None and here in intact:
            return (here.slot,)
        kept = [change.old.slots[was] for was in change.kept.values()]
        able = [*kept, *(unit.slot for unit in intact)] or self._made[change.model_stage]
        return (able[replica % len(able)],)

    def consumable(self, change: Change, places: Column) -> list[OldUnit]:
        """The old units that an in-place node on `places` would consume; none where it cannot work in place."""
        intact = self._intact[change.model_stage]
        if change.stage is Stage.TRAINING:
            return list(intact)
        if not change.ending or change.holds_alone == (change.stage is Stage.GENERATION):
            return []
        there = dict.fromkeys(unit for place in places.tolist() if (unit := self._here(change, place)))
        units = [unit for unit in there if unit not in self._ended]
        return units if change.stage is Stage.GENERATION else [unit for unit in units if unit in intact][:1]

    def made(self, change: Change, replica: int) -> None:
        self._made[change.model_stage].append(change.new.slots[replica])

    def consume(self, units: Iterable[OldUnit], given_up: Mapping[int, int]) -> None:
        for unit in units:
            self._intact[unit.change.model_stage].pop(unit, None)
            self.consumed.setdefault(unit, {}).update(
                {place: given_up[place] for place in unit.ranks if place in given_up}
            )

    def end(self, unit: OldUnit) -> None:
        self._ended.add(unit)
        self._intact[unit.change.model_stage].pop(unit, None)

    def leave(self, unit: OldUnit, place: int) -> bool:
        """Count its bytes on `place` as freed; False where they were already."""
        if unit not in self._on[place]:
            return False
        self._on[place] = [other for other in self._on[place] if other is not unit]
        return True

    def _here(self, change: Change, place: int) -> OldUnit | None:
        """The old unit of `change` on `place`, as long as its bytes count there."""
        return next((unit for unit in self._on[place] if unit.change is change), None)
