"""The transitions of this coordinator's jobs: planned, prepared, run, undone, and taken up again from the journal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from nereus_common.core.errors import Conflict, NereusError, NotFound, ProcessLost
from nereus_common.core.ids import JobId, ModelStage, Stage, TransitionId
from nereus_common.core.plan import Plan
from nereus_common.registry import TransitionRecord, Versioned
from nereus_common.rpc.transitions import dag_to_json
from nereus_common.transitions.dag import TransitionDag
from nereus_common.transitions.lifecycle import TransitionState

from .digests import digest_stage
from .fitting import fit
from .jobs import PlacedJob, PlacedJobs
from .journal import TransitionJournal
from .ledger import UnitLedger
from .placement import Placement, needed_bytes
from .reach import Reach
from .underway import Underway, quietly

log = logging.getLogger(__name__)

UNDO_SECONDS = 60.0


class Transitions:
    """At most one is under way per job."""

    def __init__(self, jobs: PlacedJobs, ledger: UnitLedger, reach: Reach) -> None:
        self._jobs = jobs
        self._ledger = ledger
        self._reach = reach
        self._underway: dict[JobId, Underway] = {}

    async def plan(self, job: JobId, target: Plan) -> tuple[TransitionDag, PlacedJob]:
        """What moving the job to `target` would do. Raises what `plan_transition` raises; nothing is changed."""
        placed = self._jobs.get(job)
        await self._reach.check_devices(job, target)
        return await fit(self._ledger.registry, placed, _target(placed, target)), placed

    async def prepare(self, job: JobId, transition: TransitionId, epoch: int, target: Plan, timeout: float) -> None:
        """Begin a recorded transition: start what can start beside the running job. Idempotent by its id.

        StaleEpoch, Conflict while another is under way; whatever else fails is undone.
        """
        known = self._underway.get(job)
        if known is not None:
            if known.id == transition:
                return
            raise Conflict(f"job {job} is in transition {known.id}", remedy="wait until it has ended", job=job)
        placed = self._jobs.get(job, epoch)
        stored = await self._ledger.registry.get_transition(job, transition)
        journal = TransitionJournal(self._ledger, stored)
        try:
            dag, _ = await self.plan(job, target)
            to = _target(placed, target)
            underway = Underway(placed, to, dag, await needed_bytes(to), self._jobs, self._ledger, self._reach, journal)
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
        """See `Underway.run`. Idempotent: a transition that is done returns the job as it is."""
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
                return await underway.run(version, timeout)
            finally:
                self._underway.pop(job, None)

    async def abort(self, job: JobId, transition: TransitionId) -> None:
        """Undo one that has not been committed; one that is not under way is left as it is."""
        underway = self._underway.get(job)
        if underway is not None and underway.id == transition:
            self._underway.pop(job)
            await underway.undo(Conflict(f"transition {transition} was aborted", transition=transition))

    async def forget(self, job: JobId) -> None:
        """The job's units are about to be released: end what is under way."""
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
        stays = {*record.kept, *record.units} if committed else {u.value.id for u in known} - {*record.units}
        await self._jobs.forget([unit for unit in known if unit.value.id not in stays])
        if committed:
            if record.state is TransitionState.MOVING:
                await journal.become(TransitionState.COMMITTED)
            await journal.become(TransitionState.DONE)
            log.warning("job %s: transition %s was committed and is finished now", record.job, record.id)
            return
        targets = await self._reach.stage_services()
        for left in (one.value for one in known if one.value.id in stays):
            if left.model_stage.stage is not Stage.GENERATION:
                remote = self._reach.unit(left, targets)
                await quietly(remote.withdraw(UNDO_SECONDS), f"{left.id} did not take its offer back")
        lost = ProcessLost("the coordinator ended while the transition was under way", process="coordinator")
        await journal.failed(TransitionState.LOST if any(record.rounds.values()) else TransitionState.UNDONE, lost)
        log.warning("job %s: transition %s was under way and is undone", record.job, record.id)

    async def _was_committed(self, record: TransitionRecord) -> bool:
        """Between the plan's commit and the journal's next line."""
        try:
            plan = await self._ledger.registry.get_plan(record.job)
        except NotFound:
            return False
        return plan.epoch == record.from_epoch + 1 and plan.plan == record.target


def _target(placed: PlacedJob, plan: Plan) -> Placement:
    return replace(placed.placement, plan=plan, epoch=placed.placement.epoch + 1, checkpoint="")
