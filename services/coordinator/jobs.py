"""The jobs this coordinator has placed, and what it does to them: place, sync, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nereus_common.core.emu import Event, Phase, Unit
from nereus_common.core.errors import Conflict, NotFound, ProcessLost, StaleEpoch, Unavailable
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage
from nereus_common.core.plan import Plan
from nereus_common.registry import Versioned
from nereus_common.rpc.together import together
from nereus_common.stages.base import UnitSpec, new_unit

from .copies import fill_from_copies
from .ledger import UnitLedger
from .placement import Placement, copies_bytes, loads_from_folder, needed_bytes, synced_models, unit_specs
from .rates import LinkRates
from .reach import Reach, Targets, meeting_point
from .remote_unit import RemoteUnit
from .sync import SyncReport, WeightSync

log = logging.getLogger(__name__)

LEADING_SECONDS = 300.0
"""A new leader may have to wake engines first."""


@dataclass(slots=True)
class PlacedJob:
    """All units of a job, and how its trained models reach the others. `placement.epoch`: the plan in force."""

    placement: Placement
    units: Sequence[RemoteUnit]
    syncs: Mapping[str, WeightSync]
    reports: Sequence[SyncReport] = ()
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    def of(self, model_stage: ModelStage) -> list[RemoteUnit]:
        """Its units, by replica."""
        mine = (unit for unit in self.units if unit.unit.model_stage == model_stage)
        return sorted(mine, key=lambda unit: unit.unit.replica)


class PlacedJobs:
    """Acts only as the leader: writes carry the fence of its lease, and the registry refuses older ones."""

    def __init__(self, ledger: UnitLedger, reach: Reach) -> None:
        self._ledger = ledger
        self._reach = reach
        self._jobs: dict[JobId, PlacedJob] = {}
        self._placing: dict[JobId, asyncio.Lock] = {}
        self._opened = asyncio.Event()
        self.rates = LinkRates()

    def open(self) -> None:
        """What an earlier life of this service left under way is ended: jobs may be placed, or taken over."""
        self._opened.set()

    def get(self, job: JobId, epoch: int | None = None) -> PlacedJob:
        """NotFound when this coordinator has not placed it; StaleEpoch when another plan epoch is in force."""
        placed = self._jobs.get(job)
        if placed is None:
            raise NotFound(f"job {job} is not placed here", remedy="place it first", job=job)
        if epoch is not None and epoch != placed.placement.epoch:
            raise StaleEpoch(f"job {job} is at epoch {placed.placement.epoch}, the call is of {epoch}", job=job)
        return placed

    def put(self, placed: PlacedJob) -> None:
        """Another plan is in force."""
        self._jobs[placed.placement.job] = placed

    async def place(self, placement: Placement, timeout: float) -> PlacedJob:
        """Idempotent by (job, epoch), also over lives of this service: a job whose units live is taken over as it is.
        When anything fails, nothing of the job is left."""
        await self._leads()
        async with self._placing.setdefault(placement.job, asyncio.Lock()):
            placed = self._jobs.get(placement.job)
            if placed is not None:
                self._check_same(placed.placement, placement)
                return placed
            try:
                async with asyncio.timeout(timeout):
                    placed = await self._taken_over(placement) or await self._place(placement, timeout)
            except BaseException:
                await asyncio.shield(self.release(placement.job))
                raise
            self._jobs[placement.job] = placed
            return placed

    async def sync(self, job: JobId, epoch: int, model: str, version: int, timeout: float) -> SyncReport:
        placed = self.get(job, epoch)
        weight_sync = placed.syncs.get(model)
        if weight_sync is None:
            return SyncReport(model, version, 0, 0, 0.0, {})
        async with placed.busy:
            report = await weight_sync.run(version, timeout, f"{job}.e{epoch}.sync.{model}.v{version}")
            self.rates.saw(report.measured)
            await self._ledger.took_version(weight_sync.receivers, version)
            return report

    async def release(self, job: JobId, *, keep_copies: bool = False) -> None:
        """Release every unit the registry knows of the job, then its grants. A dead service holds nothing up.

        `keep_copies`: units that keep copies of their state stay on record as lost, for the next placement.
        """
        self._jobs.pop(job, None)
        await self.forget(await self._ledger.known(job), keep_copies=keep_copies)

    async def forget(self, units: Sequence[Versioned[Unit]], *, keep_copies: bool = False) -> None:
        """Release these units wherever they are, then their grants and records."""
        kept = await self._reach.release((unit.value for unit in units), keep_copies=keep_copies)
        for unit in units:
            if unit.value.id in kept:
                await self._ledger.lost(unit.value)
            else:
                await self._ledger.remove(unit)

    async def _leads(self) -> None:
        """Return once this coordinator holds the lease, which lapses some seconds after a former holder was killed."""
        try:
            async with asyncio.timeout(LEADING_SECONDS):
                await self._opened.wait()
        except TimeoutError:
            raise Unavailable("this coordinator does not hold the lease", remedy="another one may: try again") from None

    async def _place(self, placement: Placement, timeout: float) -> PlacedJob:
        needed = await needed_bytes(placement)
        await self._reach.check_devices(placement.job, placement.plan)
        targets = await self._reach.stage_services()
        left = await self._copies_left(placement)
        specs = unit_specs(placement, meeting_point)
        for spec in specs:
            await self._ledger.add(spec, wanted_bytes(new_unit(spec), needed))
        units = await self.prepare(specs, targets, timeout)
        loaded = [unit for unit in units if loads_from_folder(placement.plan, unit.unit.model_stage)]
        if placement.from_copies:
            await fill_from_copies(placement, [self._reach.unit(unit.value, targets) for unit in left], units, timeout)
            loaded = [unit for unit in loaded if unit.unit.model_stage.stage is not Stage.TRAINING]
        await together(self._load(unit, placement, timeout) for unit in loaded)
        syncs = syncs_of(units, placement)
        version, transition = placement.version, f"{placement.job}.e{placement.epoch}.place"
        reports = [await one.run(version, timeout, transition) for one in syncs.values()]
        await self._ledger.advance(units, Event.LOAD_STARTED, Event.LOADED, Event.COMMITTED, version=version)
        epoch = await self._ledger.commit_plan(placement.job, placement.epoch - 1, placement.plan)
        await self.forget(left)
        log.info("job %s placed at epoch %d: plan %s", placement.job, epoch, placement.plan.id)
        return PlacedJob(placement, units, syncs, reports)

    async def _copies_left(self, placement: Placement) -> Sequence[Versioned[Unit]]:
        """The units of an earlier epoch of which copies are to be used; what their ranks were granted is given back."""
        if not placement.from_copies:
            return ()
        left = await self._ledger.known(placement.job)
        for unit in left:
            await self._ledger.grant(unit.value.id, await copies_bytes(placement, unit.value))
        return left

    async def prepare(self, specs: Sequence[UnitSpec], targets: Targets, timeout: float) -> list[RemoteUnit]:
        """Start recorded units, all at once, because the ranks of a model-stage meet in one group."""
        units = [self._reach.unit(new_unit(spec), targets) for spec in specs]
        await together(unit.prepare(spec, timeout) for unit, spec in zip(units, specs, strict=True))
        await self._ledger.advance(units, Event.PREPARED)
        return units

    async def _taken_over(self, placement: Placement) -> PlacedJob | None:
        """The job as an earlier life of this service left it, when that is what is asked for; ProcessLost when not all
        of it serves."""
        try:
            committed = await self._ledger.registry.get_plan(placement.job)
        except NotFound:
            return None
        if committed.epoch != placement.epoch or committed.plan != placement.plan:
            return None
        known = [unit.value for unit in await self._ledger.known(placement.job)]
        placed = units_in_place(placement, known)
        if placed is None:
            found = ", ".join(f"{unit.id} is {unit.phase}" for unit in known)
            raise ProcessLost(
                f"job {placement.job} is not whole at epoch {placement.epoch}: {found or 'no unit is left'}"
            )
        needed = await needed_bytes(placement)
        for unit in placed:  # a transition that was under way may have taken grants from them
            await self._ledger.grant(unit.id, wanted_bytes(unit, needed))
        targets = await self._reach.stage_services()
        units = [self._reach.unit(unit, targets) for unit in placed]
        log.info("job %s taken over at epoch %d", placement.job, placement.epoch)
        return PlacedJob(placement, units, syncs_of(units, placement))

    async def _load(self, unit: RemoteUnit, placement: Placement, timeout: float) -> None:
        trains = unit.unit.model_stage.stage is Stage.TRAINING
        await unit.load(placement.version, timeout, placement.checkpoint if trains else "")
        await unit.commit(placement.version, timeout)

    @staticmethod
    def _check_same(placed: Placement, asked: Placement) -> None:
        if placed != asked:
            raise Conflict(
                f"job {asked.job} is placed at epoch {placed.epoch} with plan {placed.plan.id}",
                remedy="release it first",
                job=asked.job,
            )


def syncs_of(units: Iterable[RemoteUnit], placement: Placement) -> dict[str, WeightSync]:
    """How each trained model that is used elsewhere too reaches its other units."""
    everything = list(units)
    return {model: sync_of(model, everything, placement.plan) for model in synced_models(placement.plan)}


def wanted_bytes(unit: Unit, needed: Mapping[tuple[ModelStage, int, int], int]) -> dict[DeviceId, int]:
    """What the unit's ranks need, by device."""
    return {device: needed[unit.model_stage, unit.replica, rank] for rank, device in enumerate(unit.devices)}


def units_in_place(placement: Placement, known: Iterable[Unit]) -> list[Unit] | None:
    """The units of the plan, numbered as its replicas are; None unless exactly those are there and serve.

    They are told by their devices: a unit that a transition kept may be another replica of the plan it led to.
    """
    left = list(known)
    found: list[Unit] = []
    for name, stage in placement.plan.stages:
        for replica in range(stage.replicas):
            place = name, stage.unit_devices(replica)
            unit = next((one for one in left if (one.model_stage, one.devices) == place), None)
            if unit is None or unit.phase is not Phase.ACTIVE:
                return None
            left.remove(unit)
            found.append(replace(unit, replica=replica))
    return None if left else found


def sync_of(
    model: str, units: Iterable[RemoteUnit], plan: Plan, receivers: Sequence[RemoteUnit] | None = None
) -> WeightSync:
    """From the model's training units among `units` to `receivers`, by default all its others."""
    mine = [unit for unit in units if unit.unit.model_stage.model == model]
    trained = ModelStage(model, Stage.TRAINING)
    others = [unit for unit in mine if unit.unit.model_stage != trained]
    return WeightSync(
        model=model,
        wire_dtype=plan[trained].dtypes.compute,
        sources=[unit for unit in mine if unit.unit.model_stage == trained],
        receivers=others if receivers is None else receivers,
    )
