"""What users ask about transitions: shown, asked for, listed. The running job's own loop carries them out."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.spec import JobSpec
from nereus.v1 import transitions_pb2 as pb
from nereus_common.core.errors import Conflict, Unavailable
from nereus_common.core.ids import JobId, ModelStage, TransitionId, check_name
from nereus_common.core.plan import Plan
from nereus_common.registry import CommittedPlan, JobState, TransitionRecord

from .coordinator import Coordinator
from .moves import Asked
from .readiness import COORDINATOR
from .surroundings import Surroundings

PLAN_SECONDS = 30.0
DIGEST_SECONDS = 120.0


class TransitionDesk:
    """Takes wishes for any job of this controller."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def show(self, job: JobId, target: Plan) -> pb.Transition:
        """A dry run from the plan in force. Raises what the coordinator's planner raises."""
        await self._running(job)
        return await (await self._coordinator()).plan_transition(job, target, PLAN_SECONDS, links=True)

    async def show_from(self, spec: JobSpec, target: Plan) -> pb.Transition:
        """A dry run of a job that is only a file, from the plan in it, which it must have."""
        plan = spec.written_plan
        return await (await self._coordinator()).plan_transition_from(spec, plan, target, PLAN_SECONDS)

    async def apply(
        self, job: JobId, target: Plan, transition: str = "", *, due: int | None = None
    ) -> TransitionRecord:
        """Record a transition, which the job runs at its next safe boundary, or at that of version `due`.

        Idempotent by id. Conflict while another of the job is under way, or when it leads nowhere.
        """
        plan = await self._running(job)
        known = [stored.value for stored in await self._around.registry.transitions(job)]
        name = TransitionId(check_name(transition or f"{job}.t{len(known) + 1}", "transition_id"))
        for record in known:
            if record.id == name and record.target == target:
                return record
            if record.id == name or not (record.state.ended or record.state.committed):
                raise Conflict(
                    f"transition {record.id} of job {job} is {record.state}", remedy="wait until it has ended", job=job
                )
        if target == plan.plan:
            raise Conflict(f"job {job} runs under that plan already", remedy="nothing has to be moved", job=job)
        await (await self._coordinator()).plan_transition(job, target, PLAN_SECONDS)
        record = TransitionRecord(name, job, plan.epoch, plan.plan, target, self._around.clock())
        await self._around.registry.put_transition(record, expected=0)
        self._around.moves(job).put_nowait(Asked(name, due))
        return record

    async def get(self, job: JobId, transition: TransitionId) -> TransitionRecord:
        return (await self._around.registry.get_transition(job, transition)).value

    async def list(self, job: JobId) -> tuple[TransitionRecord, ...]:
        await self._around.registry.get_job(job)
        return tuple(stored.value for stored in await self._around.registry.transitions(job))

    async def digest(self, job: JobId, name: ModelStage) -> tuple[int, Mapping[str, int]]:
        """Version and digests by kind of what a model-stage of a running job holds."""
        await self._running(job)
        return await (await self._coordinator()).digest(job, name, DIGEST_SECONDS)

    async def _running(self, job: JobId) -> CommittedPlan:
        """The plan in force; Conflict when the job does not run."""
        state = (await self._around.registry.get_job(job)).value.state
        if state is not JobState.RUNNING:
            raise Conflict(f"job {job} is {state}", remedy="transitions need a running job", job=job)
        return await self._around.registry.get_plan(job)

    async def _coordinator(self) -> Coordinator:
        for status in await self._around.registry.services():
            if status.alive and status.service.role == COORDINATOR:
                return Coordinator(status.service.target, self._around.channels.get(status.service.target))
        raise Unavailable("no coordinator is alive", remedy="`nereus up` starts what is missing")
