"""Placing nodes one after another into the room there is: shadow, behind the end of another unit, or in place.

The nodes of a model-stage are placed all at once where that says the same as one after another would (`_together`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nereus_common.core.ids import DeviceId, Stage
from nereus_common.transitions.change import Change, Column
from nereus_common.transitions.dag import Mode, PerDevice
from nereus_common.transitions.drafts import Drafts
from nereus_common.transitions.needs import InfeasibleTransition
from nereus_common.transitions.room import Room
from nereus_common.transitions.sources import NOBODY, Holders
from nereus_common.transitions.together import choose


@dataclass(frozen=True, slots=True)
class _Makes:
    """Nodes of one model-stage still to be placed. `replicas`, `places`: per node the units that it makes and, per
    rank, their devices. `total`, `state`: bytes per rank, the same for every node."""

    change: Change
    replicas: Sequence[tuple[int, ...]]
    places: Column
    total: Column
    state: Column

    def __len__(self) -> int:
        return len(self.replicas)

    def only(self, chosen: Sequence[int]) -> _Makes:
        if len(chosen) == len(self):
            return self
        replicas = [self.replicas[row] for row in chosen]
        return _Makes(self.change, replicas, self.places[list(chosen)], self.total, self.state)

    def unit(self, row: int) -> int:
        """The number of the first unit that node `row` makes."""
        return self.change.new.first + self.replicas[row][0]

    def each(self) -> Iterator[_Make]:
        for replicas, places in zip(self.replicas, self.places, strict=True):
            yield _Make(self.change, replicas, places, self.total, self.state)


@dataclass(frozen=True, slots=True)
class _Make:
    """One of them."""

    change: Change
    replicas: tuple[int, ...]
    places: Column
    total: Column
    state: Column

    @property
    def unit(self) -> int:
        """The number of the first unit that it makes."""
        return self.change.new.first + self.replicas[0]


class Placing:
    def __init__(
        self,
        changes: Sequence[Change],
        room: Room,
        devices: Sequence[DeviceId],
        layers: Mapping[str, int],
        bucket_bytes: int,
    ) -> None:
        self.room = room
        self.drafts = Drafts(changes, layers)
        self._changes, self._devices, self._bucket = changes, devices, bucket_bytes
        self._holders = Holders(changes, len(devices))
        self._refused: dict[int, tuple[int, int]] = {}

    def run(self, order: Sequence[Change]) -> None:
        """Place every node, then the ends nobody waits for. Raises InfeasibleTransition."""
        pending = [makes for change in order if len(makes := self._fitting(change))]
        while pending:
            left = [rest for makes in pending if len(rest := self._shadows(makes))]
            if sum(map(len, left)) == sum(map(len, pending)):
                left = self._squeeze(left)
            pending = left
        for change in self._changes:
            for replica in change.ending:
                self._end(change.old.first + replica)

    def _fitting(self, change: Change) -> _Makes:
        """Place the units that fit beside everything, all at once; the rest of them, as nodes to be placed."""
        new = change.new
        if change.stage is Stage.TRAINING and change.coming:
            total, state = np.tile(new.total, len(change.coming)), np.tile(new.state, len(change.coming))
            return _Makes(change, [change.coming], new.places.reshape(1, -1), total, state)
        makes = _Makes(change, [(one,) for one in change.coming], new.places[list(change.coming)], new.total, new.state)
        fits = self.room.fits(makes.places, makes.total)
        if fits.any():
            self._take(makes.only(np.flatnonzero(fits).tolist()))
        return makes.only(np.flatnonzero(~fits).tolist())

    def _take(self, makes: _Makes) -> None:
        """Place nodes for which there is room now."""
        self.room.take(makes.places, makes.total, makes.total)
        for replicas in makes.replicas:
            self._make(makes.change, replicas)

    def _make(self, change: Change, replicas: tuple[int, ...]) -> int:
        number = self.drafts.make(change, replicas, self._holders.sources(change, replicas[0]))
        self._made(change, replicas)
        return number

    def _made(self, change: Change, replicas: tuple[int, ...]) -> None:
        for replica in replicas:
            self._holders.made(change, replica)

    def _shadows(self, makes: _Makes) -> _Makes:
        """Place nodes beside everything that is left once the Destroys have run that they wait for; the others."""
        left = self._together(makes)
        if left is None:
            left = [row for row, make in enumerate(makes.each()) if not self._shadow(make)]
        return makes.only(left)

    def _together(self, makes: _Makes) -> list[int] | None:
        """The rows that do not fit. None, and nothing is placed, where they have to be placed one after another."""
        short = self.room.lacking(makes.places, makes.total)
        spared = makes.change if makes.change.stage is Stage.GENERATION else None
        choice = choose(self._holders, self._changes, makes.change, makes.places, short, spared)
        if choice is None:
            return None
        refused: list[int] = np.flatnonzero(choice.refused).tolist()
        if refused:
            ranks = (choice.lacking[refused] > 0).argmax(axis=1)
            places, lacking = makes.places[refused, ranks].tolist(), choice.lacking[refused, ranks].tolist()
            for row, place, bytes_lacking in zip(refused, places, lacking, strict=True):
                self._refuse(makes.unit(row), place, bytes_lacking)
        fitting = np.flatnonzero(~choice.refused).tolist()
        if fitting:
            self._behind(makes.only(fitting), choice.asked[fitting], choice.freed[fitting])
        return refused

    def _behind(self, makes: _Makes, asked: Column, freed: Column) -> None:
        """Place nodes, each behind the ends of the units `asked` on its devices, which free `freed` there."""
        numbers = []
        for replicas, units in zip(makes.replicas, asked.tolist(), strict=True):
            for unit in dict.fromkeys(units):
                if unit != NOBODY and unit not in self.drafts.ends:
                    self._end(unit)
            numbers.append(self._make(makes.change, replicas))
        waiting = asked != NOBODY
        if waiting.any():
            places, units = makes.places[waiting], asked[waiting]
            ends = np.array([self.drafts.ends[unit] for unit in units.tolist()], np.int64)
            self.room.release(places, freed[waiting], ends)
            self._holders.leave(units, places)
        self.room.take(makes.places, makes.total, makes.total)
        for number, gates in zip(numbers, self.room.gates(makes.places), strict=True):
            self.drafts.wait(number, gates)

    def _shadow(self, make: _Make, *, own: bool = False) -> bool:
        """Beside everything that is left once the Destroys have run that it has to wait for."""
        spared = make.change if make.change.stage is Stage.GENERATION and not own else None
        return self._place(make, make.total, make.total, (), spared)

    def _squeeze(self, pending: Sequence[_Makes]) -> list[_Makes]:
        """Nothing fits as a shadow: work in place in the first model-stage where that helps. What is left to place."""
        for index, makes in enumerate(pending):
            each = list(makes.each())
            for row, make in enumerate(each):
                if self._in_place(make) or self._shadow(make, own=True):
                    later = [other for other in range(row + 1, len(each)) if not self._in_place(each[other])]
                    rest = makes.only([*range(row), *later])
                    return [*pending[:index], *([rest] if len(rest) else []), *pending[index + 1 :]]
        raise self._refusal(next(pending[0].each()))

    def _in_place(self, make: _Make) -> bool:
        consumed = self._holders.consumable(make.change, make.places)
        if not consumed:
            return False
        held, asleep = self._held_by(consumed, make.places)
        rest = make.total - make.state
        if make.change.stage is Stage.GENERATION:
            during = after = make.total - (held - asleep)
        else:
            during = np.maximum(held, make.state) - held + rest + 2 * self._bucket
            after = make.total - held
        return self._place(make, during, after, consumed, None)

    def _held_by(self, units: Sequence[int], places: Column) -> tuple[Column, Column]:
        """Per place, what the units give up there when they are consumed, and what of generation stays."""
        held, asleep = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
        rows = {place: row for row, place in enumerate(places.tolist())}
        for unit in units:
            change = self._holders.owner(unit)
            gives = change.old.total if change.stage is Stage.GENERATION else change.old.state
            for rank, place in enumerate(self._holders.places(unit).tolist()):
                if place in rows:
                    held[rows[place]], asleep[rows[place]] = gives[rank], change.old.asleep[rank]
        return held, asleep

    def _place(
        self, make: _Make, during: Column, after: Column, consumed: Sequence[int], spared: Change | None
    ) -> bool:
        """Place `make` behind as many ends as it takes, or leave everything as it is and say False."""
        short = self.room.lacking(make.places, during)
        ends: dict[int, None] = {}
        for row in np.flatnonzero(short > 0).tolist():
            lacking = self._free(int(make.places[row]), int(short[row]), ends, consumed, spared)
            if lacking > 0:
                self._refuse(make.unit, int(make.places[row]), lacking)
                return False
        for unit in ends:
            self._release(unit, make.places)
        [waits] = self.room.gates(make.places[None])
        self.room.take(make.places, during, after)
        number = self._consume(make, consumed) if consumed else self._make(make.change, make.replicas)
        self.drafts.wait(number, waits)
        return True

    def _free(
        self,
        place: int,
        lacking: int,
        ends: dict[int, None],
        consumed: Sequence[int],
        spared: Change | None,
    ) -> int:
        """Choose units to end, into `ends`, until nothing is lacking on `place`; what still is."""
        here = self._holders.on(place)
        lacking -= sum(size for unit, size in here if unit in ends)
        for unit, size in here:
            if lacking <= 0:
                break
            if unit in ends or unit in consumed or self._holders.owner(unit) is spared:
                continue
            if self._holders.may_end(unit, ends):
                ends[unit] = None
                lacking -= size
        return lacking

    def _release(self, unit: int, places: Column) -> None:
        """End `unit`, and count what it frees on `places`."""
        row = self._holders.owner(unit).row
        there = places[self._holders.at[row, places] == unit]
        self.room.release(there, self._holders.held[row, there], self._end(unit))
        self._holders.leave(np.full(len(there), unit), there)

    def _end(self, unit: int) -> int:
        """Its Destroy, which frees what no in-place node has freed before."""
        if unit in self.drafts.ends:
            return self.drafts.ends[unit]
        self._holders.end(unit)
        change = self._holders.owner(unit)
        left: Sequence[int] = change.old.totals
        if unit in self._holders.consumed:
            left = self._holders.held[change.row, self._holders.places(unit)].tolist()
        return self.drafts.end(change, unit, left)

    def _consume(self, make: _Make, consumed: Sequence[int]) -> int:
        """The node that works in place, which everything placed on its devices from now on waits for."""
        given_up = dict(self._given_up(make, consumed))
        frees = PerDevice([self._devices[place] for place in given_up], list(given_up.values()))
        number = self.drafts.make(make.change, make.replicas, consumed, Mode.IN_PLACE, frees)
        self._holders.consume(consumed, given_up)
        places, amounts = np.array(list(given_up), np.int64), np.array(list(given_up.values()), np.int64)
        elsewhere = ~np.isin(places, make.places)
        self.room.release(places[elsewhere], amounts[elsewhere], number)
        self.room.gate(make.places, number)
        self._made(make.change, make.replicas)
        return number

    def _given_up(self, make: _Make, consumed: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(place, bytes) that the consumed units give up: sleepers only where the new unit moves in."""
        sleeping = make.change.stage is Stage.GENERATION
        there = set(make.places.tolist())
        for unit in consumed:
            old = self._holders.owner(unit).old
            amounts = (old.total - old.asleep if sleeping else old.state).tolist()
            for place, amount in zip(self._holders.places(unit).tolist(), amounts, strict=True):
                if not sleeping or place in there:
                    yield place, amount

    def _refuse(self, unit: int, place: int, lacking: int) -> None:
        """Remember what came nearest to fitting."""
        known = self._refused.get(unit)
        if known is None or lacking < known[1]:
            self._refused[unit] = place, lacking

    def _refusal(self, make: _Make) -> InfeasibleTransition:
        who = ", ".join(str(make.change.new.slots[replica]) for replica in make.replicas)
        place, lacking = self._refused[make.unit]
        return InfeasibleTransition(who, self._devices[place], lacking, int(self.room.budget[place]))
