"""Who holds the state of each model-stage while nodes are placed, and which old unit may end without losing it.

The law behind `may_end`: the first node placed in a model-stage reads an old unit (or one that is kept), whose end
waits for it. So when all old units have ended, a new one is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import Stage
from nereus_common.transitions.change import Change, Column

NOBODY = -1


class Holders:
    """Units by number. A model-stage has at most one old unit on a device, so what stands where is a matrix of
    (model-stage, device).

    `at`: the old unit that ends and whose bytes still count there, or NOBODY. `held`: the bytes that its end frees.
    `consumed`: old units that an in-place node has dropped or put to sleep.
    """

    def __init__(self, changes: Sequence[Change], devices: int) -> None:
        self.consumed: set[int] = set()
        self.at = np.full((len(changes), devices), NOBODY)
        self.held = np.zeros((len(changes), devices), np.int64)
        self._numbers = sum(change.old.plan.replicas + change.new.plan.replicas for change in changes)
        self._owner: dict[int, Change] = {}
        self._ended: set[int] = set()
        self._made: list[list[int]] = [[] for _ in changes]
        self._intact: list[dict[int, None]] = []
        for change in changes:
            old = change.old
            ending = [old.first + replica for replica in change.ending]
            self._intact.append(dict.fromkeys(ending))
            self._owner.update(dict.fromkeys(ending, change))
            places = old.places[list(change.ending)]
            self.at[change.row, places] = np.array(ending, np.int64)[:, None]
            self.held[change.row, places] = old.total

    def among(self, units: Column) -> NDArray[np.bool_]:
        """By number of a unit, whether it is one of `units`. NOBODY never is."""
        found = np.zeros(self._numbers + 1, bool)
        found[units] = True
        found[NOBODY] = False
        return found

    def owner(self, unit: int) -> Change:
        return self._owner[unit]

    def places(self, unit: int) -> Column:
        """The devices of an old unit, in rank order."""
        old = self._owner[unit].old
        places: Column = old.places[unit - old.first]
        return places

    def on(self, place: int) -> list[tuple[int, int]]:
        """(unit, bytes) that count on `place`, in the order in which they are asked to end."""
        found = zip(self.at[:, place].tolist(), self.held[:, place].tolist(), strict=True)
        return [(unit, size) for unit, size in found if unit != NOBODY]

    def may_end(self, unit: int, ends: Collection[int]) -> bool:
        """Whether its state has another holder when it ends, together with `ends`."""
        change = self._owner[unit]
        intact = self._intact[change.row]
        if unit not in intact or not self.guarded(change):
            return True
        return any(other != unit and other not in ends for other in intact)

    def guarded(self, change: Change) -> bool:
        """Whether nobody but its old units that are intact holds the state of `change`."""
        return change.holds_alone and not change.kept and not self._made[change.row]

    def spare(self, change: Change) -> int:
        """How many intact old units may end, so that one is left."""
        return len(self._intact[change.row]) - 1

    def sources(self, change: Change, replica: int) -> list[int]:
        """Whom new unit `replica` is filled from: of training everyone, else the unit in its place, or each in turn."""
        if not change.holds_alone:
            return []
        intact = self._intact[change.row]
        if change.stage is Stage.TRAINING:
            return list(intact)
        here = int(self.at[change.row, change.new.places[replica, 0]])
        if here in intact:
            return [here]
        kept = [change.old.first + was for was in change.kept.values()]
        able = [*kept, *intact] or self._made[change.row]
        return [able[replica % len(able)]]

    def consumable(self, change: Change, places: Column) -> list[int]:
        """The old units that an in-place node on `places` would consume; none where it cannot work in place."""
        intact = self._intact[change.row]
        if change.stage is Stage.TRAINING:
            return list(intact)
        if not change.ending or change.holds_alone == (change.stage is Stage.GENERATION):
            return []
        there = dict.fromkeys(self.at[change.row, places].tolist())
        units = [unit for unit in there if unit != NOBODY and unit not in self._ended]
        return units if change.stage is Stage.GENERATION else [unit for unit in units if unit in intact][:1]

    def made(self, change: Change, replica: int) -> None:
        self._made[change.row].append(change.new.first + replica)

    def consume(self, units: Iterable[int], given_up: Mapping[int, int]) -> None:
        """`given_up`: place → bytes."""
        for unit in units:
            change = self._owner[unit]
            self._intact[change.row].pop(unit, None)
            self.consumed.add(unit)
            for place, total in zip(self.places(unit).tolist(), change.old.totals, strict=True):
                if place in given_up:
                    self.held[change.row, place] = total - given_up[place]

    def leave(self, units: Column, places: Column) -> None:
        """Count the bytes of each of `units` on its place as freed."""
        here = self.at[:, places]
        self.at[:, places] = np.where(here == units, NOBODY, here)

    def end(self, unit: int) -> None:
        self._ended.add(unit)
        self._intact[self._owner[unit].row].pop(unit, None)
