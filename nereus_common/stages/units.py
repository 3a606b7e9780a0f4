"""The units of one stage service: lifecycle by table, one operation at a time, idempotent, refused when stale."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from nereus_common.core.emu import Event, Phase, Unit, step
from nereus_common.core.errors import (
    Conflict,
    IllegalTransition,
    InvalidInput,
    NereusError,
    NotFound,
    ProcessLost,
    StaleEpoch,
    VerificationFailed,
)
from nereus_common.core.ids import Stage, TensorName, UnitId
from nereus_common.stages.base import Holding, PullOrder, RankPulled, StateCopies, UnitHost, UnitSpec, new_unit

log = logging.getLogger(__name__)

SERVING = (Phase.ACTIVE, Phase.UPDATING)
OFFERED = (Phase.OFFERING, Phase.DRAINED)


@dataclass(slots=True)
class Entry:
    spec: UnitSpec
    unit: Unit
    host: UnitHost
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: ProcessLost | None = None
    staged: int = -1

    def apply(self, event: Event, version: int | None = None) -> None:
        """Raises the loss of a unit whose process was lost meanwhile, whatever the event."""
        self.check_lives()
        self.unit = step(self.unit, event, epoch=self.spec.epoch, version=version)

    def failed(self, event: Event) -> None:
        """Go back after an error; a unit whose process was lost meanwhile stays lost."""
        if self.lost is None:
            self.apply(event)

    def lose(self, lost: ProcessLost) -> None:
        if self.unit.phase not in (Phase.LOST, Phase.RELEASED):
            self.apply(Event.LOST)
        self.lost = lost

    def check_lives(self) -> None:
        if self.lost is not None:
            raise self.lost


class Units:
    """All units of this service. `make_host` builds a stage's own half of a unit.

    Operations on one unit run one after another; `release` does not wait for them, it ends them.
    """

    def __init__(self, make_host: Callable[[UnitSpec], UnitHost]) -> None:
        self._make_host = make_host
        self._entries: dict[UnitId, Entry] = {}
        self._ending: dict[UnitId, asyncio.Future[None]] = {}

    def entries(self) -> Sequence[Entry]:
        return tuple(self._entries.values())

    def serving(self, unit: UnitId, epoch: int, *, soon: bool = False) -> Entry:
        """The entry of a unit that may do work now; `soon`: or once the version it has loaded is committed."""
        entry = self._entry(unit, epoch)
        if entry.unit.phase not in SERVING and not (soon and entry.unit.phase is Phase.LOADED):
            raise IllegalTransition(
                f"unit {unit} is {entry.unit.phase} and does no work",
                remedy="load it and commit a version first",
                unit=unit,
            )
        return entry

    @asynccontextmanager
    async def working(self, unit: UnitId, epoch: int) -> AsyncIterator[Entry]:
        """As `serving`, while nothing else is done to the unit."""
        entry = self.serving(unit, epoch)
        async with self._operation(entry):
            yield entry

    async def prepare(self, spec: UnitSpec, timeout: float) -> Sequence[int]:
        """Start the unit; the same spec again waits for and returns the first start."""
        entry = self._entries.get(spec.unit)
        if entry is None:
            entry = self._entries[spec.unit] = Entry(spec, new_unit(spec), self._make_host(spec))
        elif entry.spec != spec:
            raise Conflict(f"unit {spec.unit} exists with another spec", remedy="release it first", unit=spec.unit)
        async with self._operation(entry):
            if entry.unit.phase is Phase.PREPARING:
                try:
                    await entry.host.prepare(timeout)
                    entry.apply(Event.PREPARED)
                except BaseException:
                    await self._discard(entry)
                    raise
            return entry.host.pids

    async def load(self, unit: UnitId, epoch: int, version: int, timeout: float, checkpoint: str = "") -> None:
        """Fill the unit from its model folder or, when it trains, from a checkpoint."""
        entry = self._entry(unit, epoch)
        if checkpoint and entry.spec.model_stage.stage is not Stage.TRAINING:
            raise InvalidInput(
                f"unit {unit} does not train, and checkpoints hold the state of trained models",
                remedy="load it from its model folder, or sync it from its training units",
                field="checkpoint",
            )
        async with self._operation(entry):
            if entry.staged == version:
                return
            entry.apply(Event.LOAD_STARTED)
            try:
                await entry.host.load(version, timeout, checkpoint)
            except NereusError:
                entry.failed(Event.LOAD_FAILED)
                raise
            entry.apply(Event.LOADED)
            entry.staged = version

    async def describe(self, unit: UnitId, epoch: int, timeout: float, state: bool = False) -> Holding:
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            return await entry.host.describe(timeout, state)

    async def pull(self, unit: UnitId, epoch: int, order: PullOrder) -> Sequence[RankPulled]:
        """Stage a version. What the unit serves does not change, so a failure leaves the unit as it was.

        Whoever began a sync may have been killed at any point of it: another begins wherever that one stopped.

        With `order.state`: fill a unit that serves nothing, part by part. It keeps what a failed part brought.
        """
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            if order.state:
                return await self._fill(entry, order)
            if entry.unit.phase not in (Phase.LOADING, Phase.UPDATING):
                first = entry.unit.phase in (Phase.PREPARED, Phase.LOADED)
                entry.apply(Event.LOAD_STARTED if first else Event.UPDATE_STARTED)
            try:
                return await entry.host.pull(order)
            except BaseException:
                entry.failed(Event.LOAD_FAILED if entry.unit.phase is Phase.LOADING else Event.UPDATE_FAILED)
                raise

    async def _fill(self, entry: Entry, order: PullOrder) -> Sequence[RankPulled]:
        if entry.unit.phase is not Phase.LOADING:
            entry.apply(Event.LOAD_STARTED)
        try:
            return await entry.host.pull(order)
        except BaseException:
            entry.failed(Event.LOAD_FAILED)
            raise

    async def offer(self, unit: UnitId, epoch: int, version: int, timeout: float) -> Holding:
        """Serve the whole state in place, or of a unit that never served what it has. It does no work meanwhile.

        Of a unit that is lost, its copies are served.
        """
        entry = self._known(unit, epoch)
        if entry.lost is not None:
            return await _copies_of(entry).offer(version, timeout)
        async with self._operation(entry):
            if entry.unit.phase in OFFERED:
                return await entry.host.offer(version, timeout)
            before = entry.unit
            entry.apply(Event.OFFERED)
            try:
                return await entry.host.offer(version, timeout)
            except NereusError:
                if entry.lost is None:
                    entry.unit = before  # it refused: nothing is offered
                raise

    async def withdraw(self, unit: UnitId, epoch: int, timeout: float) -> None:
        """End an offer that nothing was dropped from; where none is, nothing happens. Copies are served for good."""
        entry = self._known(unit, epoch)
        if entry.lost is not None:
            _copies_of(entry)
            return
        async with self._operation(entry):
            if entry.unit.phase is Phase.ACTIVE:
                return
            step(entry.unit, Event.WITHDRAWN, epoch=epoch)
            await entry.host.withdraw(timeout)
            entry.apply(Event.WITHDRAWN)

    async def drop(self, unit: UnitId, epoch: int, tensors: Sequence[TensorName], timeout: float) -> None:
        """Free tensors of an offering unit: from then on it is drained, also when this fails half way."""
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            entry.apply(Event.DROPPED)
            entry.staged = -1
            await entry.host.drop(tensors, timeout)

    async def digest(self, unit: UnitId, epoch: int, version: int, timeout: float) -> Mapping[str, int]:
        """Of the logical state, by kind; StaleVersion when the unit, or where it is lost its copies, hold another."""
        entry = self._known(unit, epoch)
        if entry.lost is not None:
            return await _copies_of(entry).digest(version, timeout)
        async with self._operation(entry):
            return await entry.host.digest(version, timeout)

    async def verify(
        self, unit: UnitId, epoch: int, version: int, wire_dtype: str, expected: Mapping[int, int], timeout: float
    ) -> Mapping[int, int]:
        """Apply what is staged and compare; a unit that differs is broken and never serves again."""
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            found = await entry.host.verify(version, wire_dtype, timeout)
            wrong = sorted(rank for rank, digest in expected.items() if found.get(rank) != digest)
            if wrong:
                entry.apply(Event.LOST)
                raise VerificationFailed(
                    f"unit {unit}: ranks {wrong} do not compute with version {version} as it was sent",
                    remedy="the unit is taken out; restart the job from its last checkpoint",
                    unit=unit,
                    version=version,
                )
            if entry.unit.phase in (Phase.LOADING, Phase.UPDATING):
                entry.apply(Event.LOADED if entry.unit.phase is Phase.LOADING else Event.UPDATED)
            return found

    async def commit(self, unit: UnitId, epoch: int, version: int, timeout: float) -> None:
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            if entry.unit.phase is Phase.ACTIVE and entry.unit.version == version:
                return
            await entry.host.commit(version, timeout)
            entry.apply(Event.COMMITTED, version)

    async def sleep(self, unit: UnitId, epoch: int, timeout: float) -> None:
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            if entry.unit.phase is Phase.ASLEEP:
                return
            before = entry.unit
            entry.apply(Event.SLEPT)
            try:
                await entry.host.sleep(timeout)
            except NereusError:
                if entry.lost is None:
                    entry.unit = before  # something kept it awake
                raise
            entry.staged = -1

    async def wake(self, unit: UnitId, epoch: int, timeout: float) -> None:
        entry = self._entry(unit, epoch)
        async with self._operation(entry):
            if entry.unit.phase is Phase.ASLEEP:
                await entry.host.wake(timeout)
                entry.apply(Event.WOKEN)

    async def release(self, unit: UnitId, epoch: int, *, keep_copies: bool = False) -> bool:
        """Stop a unit, whatever it is doing. Unknown units are released already.

        `keep_copies`: where the unit has copies of its state those stay, and it counts as lost; whether they did.
        """
        entry = self._entries.get(unit)
        if entry is None:
            if unit in self._ending:
                await asyncio.shield(self._ending[unit])
            return False
        if epoch < entry.spec.epoch:
            raise StaleEpoch(f"unit {unit} is at epoch {entry.spec.epoch}, the call is of {epoch}", unit=unit)
        if not keep_copies or entry.host.copies is None:
            await self._discard(entry)
            return False
        self.mark_lost(entry, ProcessLost(f"unit {unit} was released; only copies of its state are left", unit=unit))
        await entry.host.release_ranks()
        return True

    async def release_all(self) -> None:
        await asyncio.gather(*(self._discard(entry) for entry in self.entries()))

    async def _discard(self, entry: Entry) -> None:
        """Once begun it goes on to its end, also when whoever asked for it is killed and its call cancelled."""
        unit = entry.spec.unit
        self._entries.pop(unit, None)
        ending = self._ending[unit] = asyncio.ensure_future(entry.host.release())
        ending.add_done_callback(lambda _: self._ending.pop(unit, None))
        await asyncio.shield(ending)

    def _entry(self, unit: UnitId, epoch: int) -> Entry:
        entry = self._known(unit, epoch)
        entry.check_lives()
        return entry

    def _known(self, unit: UnitId, epoch: int) -> Entry:
        """Also one that is lost."""
        entry = self._entries.get(unit)
        if entry is None:
            raise NotFound(f"no unit {unit} here", remedy="prepare it first", unit=unit)
        if epoch != entry.spec.epoch:
            raise StaleEpoch(f"unit {unit} is at epoch {entry.spec.epoch}, the call is of {epoch}", unit=unit)
        return entry

    @asynccontextmanager
    async def _operation(self, entry: Entry) -> AsyncIterator[None]:
        """One operation on a unit; a lost process is remembered and ends the unit, and no operation outlives it."""
        async with entry.busy:
            entry.check_lives()
            try:
                yield
                entry.check_lives()
            except ProcessLost as lost:
                self.mark_lost(entry, lost)
                raise

    def note_loss(self, unit: UnitId, lost: ProcessLost) -> None:
        """A process of the unit ended while nobody called it."""
        entry = self._entries.get(unit)
        if entry is not None:
            self.mark_lost(entry, lost)

    def mark_lost(self, entry: Entry, lost: ProcessLost) -> None:
        if entry.lost is None:
            log.error("unit %s lost: %s", entry.spec.unit, lost)
            entry.lose(lost)


def _copies_of(entry: Entry) -> StateCopies:
    """Of a unit that is lost; raises its loss where it has none."""
    assert entry.lost is not None
    copies = entry.host.copies
    if copies is None:
        raise entry.lost
    return copies
