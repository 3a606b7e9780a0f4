"""The transitions of this coordinator's jobs: planned, prepared, run, undone, and taken up again from the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nereus_common.core.emu import Unit
from nereus_common.core.errors import Conflict, NereusError, NotFound, ProcessLost
from nereus_common.core.ids import JobId, ModelStage, Stage, TransitionId
from nereus_common.core.plan import Plan
from nereus_common.registry import TransitionRecord, Versioned
from nereus_common.rpc.transitions import dag_to_json
from nereus_common.state.program import BUCKET_BYTES
from nereus_common.transitions.dag import TransitionDag
from nereus_common.transitions.lifecycle import TransitionState
from nereus_common.transitions.traffic import LinkTraffic, Phase, predicted_seconds

from .digests import digest_stage
from .fitting import Fitted, fit
from .jobs import PlacedJob, PlacedJobs
from .journal import TransitionJournal
from .ledger import UnitLedger
from .placement import Placement, needed_bytes
from .putting_back import PuttingBack, moved_back
from .reach import Reach
from .underway import UNDO_SECONDS, Underway

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """A transition that nobody began. `links`, where they were asked for; `seconds` by phase, as the links measured so
    far let expect."""

    job: JobId
    epoch: int
    dag: TransitionDag
    links: Sequence[LinkTraffic]
    seconds: Mapping[Phase, float]


class Transitions:
    """At most one is under way per job. `bucket_bytes`: the most that a rank receives at once."""

    def __init__(self, jobs: PlacedJobs, ledger: UnitLedger, reach: Reach, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._jobs = jobs
        self._ledger = ledger
        self._reach = reach
        self._bucket_bytes = bucket_bytes
        self._underway: dict[JobId, Underway] = {}
        self._finishing: dict[JobId, asyncio.Task[None]] = {}

    async def show(self, job: JobId, target: Plan, *, links: bool) -> Shown:
        """What moving a placed job to `target` would do. Raises what `plan_transition` raises; nothing is changed."""
        placed = self._jobs.get(job).placement
        return await self._shown(placed, await self._fit(placed, target), links)

    async def show_from(self, placement: Placement, target: Plan, *, links: bool) -> Shown:
        """The same of a job that is placed nowhere."""
        await self._reach.check_devices(placement.job, placement.plan)
        return await self._shown(placement, await self._fit(placement, target), links)

    async def _fit(self, placement: Placement, target: Plan) -> Fitted:
        await self._reach.check_devices(placement.job, target)
        return await fit(self._ledger.registry, placement, _target(placement, target), self._bucket_bytes)

    async def _shown(self, placement: Placement, fitted: Fitted, links: bool) -> Shown:
        found = await asyncio.to_thread(fitted.traffic) if links else ()
        seconds = predicted_seconds(found, self._jobs.rates.bytes_per_second)
        return Shown(placement.job, placement.epoch, fitted.dag, found, seconds)

    async def prepare(self, job: JobId, transition: TransitionId, epoch: int, target: Plan, timeout: float) -> None:
        """Begin a recorded transition: start what can start beside the running job. Idempotent by its id.

        StaleEpoch, Conflict while another is under way; whatever else fails is undone.
        """
        known = self._underway.get(job)
        if known is not None:
            if known.id == transition:
                return
            raise Conflict(f"job {job} is in transition {known.id}", remedy="wait until it has ended", job=job)
        await self.finished(job)
        placed = self._jobs.get(job, epoch)
        stored = await self._ledger.registry.get_transition(job, transition)
        journal = TransitionJournal(self._ledger, stored)
        try:
            dag = (await self._fit(placed.placement, target)).dag
            to = _target(placed.placement, target)
            needed = await needed_bytes(to)
            reached = self._jobs, self._ledger, self._reach, journal
            underway = Underway(placed, to, dag, needed, *reached, self._bucket_bytes)
        except NereusError as error:
            await journal.failed(TransitionState.UNDONE, error)
            raise
        self._underway[job] = underway
        try:
            await underway.prepare(dag_to_json(dag), timeout)
        except BaseException:
            self._underway.pop(job, None)
            raise

    async def run(self, job: JobId, transition: TransitionId, epoch: int, version: int, timeout: float) -> PlacedJob:
        """See `Underway.run`; what the new plan has no use for is released after this returns.

        Idempotent: a transition that is committed returns the job as it is.
        """
        underway = self._underway.get(job)
        if underway is None or underway.id != transition:
            record = (await self._ledger.registry.get_transition(job, transition)).value
            if record.state.committed:
                return self._jobs.get(job, record.from_epoch + 1)
            raise NotFound(
                f"transition {transition} of job {job} is {record.state} and not under way here", transition=transition
            )
        self._jobs.get(job, epoch)
        async with underway.placed.busy:
            try:
                placed = await underway.run(version, timeout)
            finally:
                self._underway.pop(job, None)
        self._finishing[job] = asyncio.create_task(_finish(underway), name=f"{transition}: release")
        return placed

    async def finished(self, job: JobId) -> None:
        """Wait until nothing is being released any more."""
        finishing = self._finishing.pop(job, None)
        if finishing is not None:
            await asyncio.wait([finishing])

    async def abort(self, job: JobId, transition: TransitionId) -> None:
        """Undo one that has not been committed; one that is not under way is left as it is."""
        underway = self._underway.get(job)
        if underway is not None and underway.id == transition:
            self._underway.pop(job)
            await underway.undo(Conflict(f"transition {transition} was aborted", transition=transition))

    async def forget(self, job: JobId) -> None:
        """The job's units are about to be released: end what is under way."""
        await self.finished(job)
        underway = self._underway.pop(job, None)
        if underway is not None and not underway.journal.record.state.ended:
            await underway.undo(Conflict(f"job {job} was released", remedy="apply it again when it runs", job=job))

    async def digest(self, job: JobId, name: ModelStage, timeout: float) -> tuple[int, Mapping[str, int]]:
        """Version and digests of what a model-stage holds; VerificationFailed where replicas differ."""
        units = self._jobs.get(job).of(name)
        if not units:
            raise NotFound(f"job {job} has no {name}", remedy="`nereus job get` shows its plan", field="model_stage")
        return await digest_stage(units, timeout)

    async def recover(self) -> None:
        """End what an earlier life of this service left under way: what was committed is finished, the rest undone."""
        for job in await self._ledger.registry.jobs():
            for stored in await self._ledger.registry.transitions(job.value.id):
                if not stored.value.state.ended and stored.value.state is not TransitionState.PLANNED:
                    await self._recover(stored)

    async def _recover(self, stored: Versioned[TransitionRecord]) -> None:
        journal = TransitionJournal(self._ledger, stored)
        record = stored.value
        committed = record.state.committed or await self._was_committed(record)
        known = await self._ledger.known(record.job)
        if committed:
            stays = {*record.kept, *record.units}
            await self._jobs.forget([unit for unit in known if unit.value.id not in stays])
            if record.state is TransitionState.MOVING:
                await journal.become(TransitionState.COMMITTED)
            await journal.become(TransitionState.DONE)
            log.warning("job %s: transition %s was committed and is finished now", record.job, record.id)
            return
        whole = await self._put_back(record, known)
        if not whole:
            for unit in (one.value for one in known if one.value.id not in record.units):
                if unit.model_stage.stage is Stage.TRAINING:
                    await self._ledger.lost(unit)
        lost = ProcessLost("the coordinator ended while the transition was under way", process="coordinator")
        await journal.failed(TransitionState.UNDONE if whole else TransitionState.LOST, lost)
        log.warning("job %s: transition %s was under way and is %s", record.job, record.id, journal.record.state)

    async def _put_back(self, record: TransitionRecord, known: Sequence[Versioned[Unit]]) -> bool:
        """Release what was made and put the old units back to work; whether they hold all of the job's state."""
        made = [unit for unit in known if unit.value.id in record.units]
        left = [unit.value for unit in known if unit.value.id not in record.units]
        wanted = sum(stage.replicas for _, stage in record.plan.stages)
        moving = record.state is TransitionState.MOVING
        targets = await self._reach.stage_services()
        whole = len(left) == wanted and all(self._reach.finds(unit, targets) for unit in left)
        old = [self._reach.unit(unit, targets) for unit in left if self._reach.finds(unit, targets)]
        new = [self._reach.unit(unit.value, targets) for unit in made if self._reach.finds(unit.value, targets)]
        if moving:
            whole = whole and await moved_back(record, old, new)
        await self._jobs.forget(made)
        if moving:
            whole &= not await PuttingBack(record, old, {}, self._ledger, UNDO_SECONDS).run(old)
        return whole

    async def _was_committed(self, record: TransitionRecord) -> bool:
        """Between the plan's commit and the journal's next line."""
        try:
            plan = await self._ledger.registry.get_plan(record.job)
        except NotFound:
            return False
        return plan.epoch == record.from_epoch + 1 and plan.plan == record.target


async def _finish(underway: Underway) -> None:
    """Never fails: what stays committed and is not done is finished by the next life of this service."""
    try:
        await underway.finish()
    except NereusError as error:
        log.warning("transition %s is in force, but not all it replaced was released: %s", underway.id, error)


def _target(placement: Placement, plan: Plan) -> Placement:
    return replace(placement, plan=plan, epoch=placement.epoch + 1, checkpoint="")
