"""Placing nodes one after another into the room there is: shadow, behind the end of another unit, or in place."""

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
from nereus_common.transitions.sources import Holders, OldUnit


@dataclass(slots=True)
class _Make:
    """A node still to be placed: it makes `replicas`, on `places`, one entry per rank."""

    change: Change
    replicas: tuple[int, ...]
    places: Column
    total: Column
    state: Column


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
        self.drafts = Drafts(layers)
        self._changes, self._devices, self._bucket = changes, devices, bucket_bytes
        self._holders = Holders(changes, len(devices))
        self._refused: dict[int, InfeasibleTransition] = {}

    def run(self, order: Sequence[Change]) -> None:
        """Place every node, then the ends nobody waits for. Raises InfeasibleTransition."""
        pending = [make for change in order for make in self._fitting(change)]
        while pending:
            left = [make for make in pending if not self._shadow(make)]
            if len(left) == len(pending):
                left = self._squeeze(left)
            pending = left
        for change in self._changes:
            for unit in self._holders.units[change.model_stage]:
                self._end(unit)

    def _fitting(self, change: Change) -> list[_Make]:
        """Place the units that fit beside everything, all at once; the rest of them, as nodes to be placed."""
        if not change.coming:
            return []
        new = change.new
        if change.stage is Stage.TRAINING:
            rows = new.plan.replicas
            return [
                _Make(change, change.coming, new.places.ravel(), np.tile(new.total, rows), np.tile(new.state, rows))
            ]
        coming = np.array(change.coming)
        fits = self.room.fits(new.places[coming], new.total)
        if fits.any():
            places = new.places[coming[fits]].ravel()
            need = np.tile(new.total, int(fits.sum()))
            self.room.take(places, need, need)
            for replica in coming[fits].tolist():
                self.drafts.make(change, (replica,), self._holders.sources(change, replica))
                self._holders.made(change, replica)
        return [
            _Make(change, (replica,), new.places[replica], new.total, new.state) for replica in coming[~fits].tolist()
        ]

    def _shadow(self, make: _Make, *, own: bool = False) -> bool:
        """Beside everything that is left once the Destroys have run that it has to wait for."""
        spared = make.change if make.change.stage is Stage.GENERATION and not own else None
        return self._place(make, make.total, make.total, (), spared)

    def _squeeze(self, pending: Sequence[_Make]) -> list[_Make]:
        """Nothing fits as a shadow: work in place in the first model-stage where that helps. What is left to place."""
        for index, make in enumerate(pending):
            if self._in_place(make) or self._shadow(make, own=True):
                rest = [other for other in pending[index + 1 :] if other.change is make.change]
                done = {id(other) for other in rest if self._in_place(other)} | {id(make)}
                return [other for other in pending if id(other) not in done]
        raise self._refused[id(pending[0])]

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

    def _held_by(self, units: Sequence[OldUnit], places: Column) -> tuple[Column, Column]:
        """Per place, what the units give up there when they are consumed, and what of generation stays."""
        held, asleep = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
        rows = {place: row for row, place in enumerate(places.tolist())}
        for unit in units:
            old = unit.change.old
            gives = old.total if unit.change.stage is Stage.GENERATION else old.state
            for place, rank in unit.ranks.items():
                if place in rows:
                    held[rows[place]], asleep[rows[place]] = gives[rank], old.asleep[rank]
        return held, asleep

    def _place(
        self, make: _Make, during: Column, after: Column, consumed: Sequence[OldUnit], spared: Change | None
    ) -> bool:
        """Place `make` behind as many ends as it takes, or leave everything as it is and say False."""
        short = self.room.lacking(make.places, during)
        ends: dict[OldUnit, None] = {}
        for row in np.flatnonzero(short > 0).tolist():
            lacking = self._free(make, int(make.places[row]), int(short[row]), ends, consumed, spared)
            if lacking > 0:
                self._refuse(make, int(make.places[row]), lacking)
                return False
        waits = [self._release(unit, make.places) for unit in ends]
        waits = list(dict.fromkeys((*self.room.gates(make.places), *waits)))
        self.room.take(make.places, during, after)
        self._draft(make, waits, consumed)
        return True

    def _free(
        self,
        make: _Make,
        place: int,
        lacking: int,
        ends: dict[OldUnit, None],
        consumed: Sequence[OldUnit],
        spared: Change | None,
    ) -> int:
        """Choose units to end, into `ends`, until nothing is lacking on `place`; what still is."""
        lacking -= sum(self._holders.amount(unit, place) for unit in self._holders.on(place) if unit in ends)
        for unit in self._holders.on(place):
            if lacking <= 0:
                break
            if unit in ends or unit in consumed or unit.change is spared:
                continue
            if self._holders.may_end(unit, ends):
                ends[unit] = None
                lacking -= self._holders.amount(unit, place)
        return lacking

    def _release(self, unit: OldUnit, places: Column) -> int:
        """End `unit`, and count what it frees on `places`."""
        number = self._end(unit)
        there = set(places.tolist())
        for place in unit.ranks:
            if place in there and self._holders.leave(unit, place):
                self.room.release(place, self._holders.amount(unit, place), number)
        return number

    def _end(self, unit: OldUnit) -> int:
        """Its Destroy, which frees what no in-place node has freed before."""
        self._holders.end(unit)
        if unit.slot in self.drafts.ends:
            return self.drafts.ends[unit.slot]
        old = unit.change.old
        left: Sequence[int] = old.totals
        if unit in self._holders.consumed:
            left = [self._holders.amount(unit, place) for place in unit.ranks]
        return self.drafts.end(unit.change, unit.replica, PerDevice(old.plan.unit_devices(unit.replica), left))

    def _draft(self, make: _Make, waits: Sequence[int], consumed: Sequence[OldUnit]) -> None:
        change = make.change
        if not consumed:
            sources = self._holders.sources(change, make.replicas[0])
            self.drafts.make(change, make.replicas, sources, waits)
        else:
            frees = dict(self._given_up(make, consumed))
            devices = [self._devices[place] for place in frees]
            number = self.drafts.make(
                change,
                make.replicas,
                tuple(unit.slot for unit in consumed),
                waits,
                Mode.IN_PLACE,
                PerDevice(devices, list(frees.values())),
            )
            self._holders.consume(consumed, frees)
            there = set(make.places.tolist())
            for place, amount in frees.items():
                if place not in there:
                    self.room.release(place, amount, number)
            for place in there:
                self.room.gate(place, number)
        for replica in make.replicas:
            self._holders.made(change, replica)

    def _given_up(self, make: _Make, consumed: Sequence[OldUnit]) -> Iterator[tuple[int, int]]:
        """(place, bytes) that the consumed units give up: sleepers only where the new unit moves in."""
        sleeping = make.change.stage is Stage.GENERATION
        there = set(make.places.tolist())
        for unit in consumed:
            old = unit.change.old
            amounts = (old.total - old.asleep if sleeping else old.state).tolist()
            for place, amount in zip(unit.ranks, amounts, strict=True):
                if not sleeping or place in there:
                    yield place, amount

    def _refuse(self, make: _Make, place: int, lacking: int) -> None:
        """Remember what came nearest to fitting."""
        known = self._refused.get(id(make))
        if known is None or lacking < int(known.details["bytes"]):
            who = ", ".join(str(make.change.new.slots[replica]) for replica in make.replicas)
            budget = int(self.room.budget[place])
            self._refused[id(make)] = InfeasibleTransition(who, self._devices[place], lacking, budget)
