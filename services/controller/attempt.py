"""One attempt at a job: wait for the services, clear away what an earlier one left, place, run the loop, release."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from nereus.planning import shape_of, shapes_of
from nereus.spec import JobSpec
from nereus.spec.moves import merge_target
from nereus.v1 import transitions_pb2
from nereus_common.core.errors import NereusError, NotFound, Unavailable
from nereus_common.core.ids import JobId, Stage, TransitionId
from nereus_common.core.plan import Plan
from nereus_common.core.workflow import ACTOR_GENERATION
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.planning.default import default_plan
from nereus_common.registry import JobState
from nereus_common.rl.prompts import OrderedPrompts
from nereus_common.state.architecture import ModelShape

from .attempts import Start
from .autopilot import Autopilot, Hands
from .checkpoints import Checkpointer, Described
from .coordinator import Coordinator
from .generation import GenerationPool
from .journal import JobJournal
from .leaving import Leaving
from .loop import RlLoop, Stages
from .moves import Mover
from .parts import Surrounding, build_parts, build_sampler, build_stages
from .placed import PlacedJob, PlacedStage
from .progress import Progress
from .readiness import await_services, needs_of
from .replanning import Replanning
from .scoring import Scoring
from .surroundings import Surroundings
from .synced import Synced
from .transitions import TransitionDesk

log = logging.getLogger(__name__)


class Attempt:
    """Its units have an epoch that no earlier attempt had. Whatever happens, they are released.

    `patience`: seconds that it waits for services that are not there. `plan`: to start under, by default the spec's.
    """

    def __init__(
        self,
        job: JobId,
        spec: JobSpec,
        around: Surroundings,
        journal: JobJournal,
        start: Start,
        patience: float,
        plan: Plan | None = None,
    ) -> None:
        self._job = job
        self._spec = spec
        self._around = around
        self._journal = journal
        self._start = start
        self._patience = patience
        self._plan = plan or spec.explicit_plan
        self._epoch = 0
        self._reached: Progress | None = None

    @property
    def copies(self) -> Progress | None:
        """After a failure: the progress of which copies of the trained models' state are left; None where none are."""
        return self._reached if self._spec.redundancy else None

    async def run(self) -> None:
        """Returns when all steps are done."""
        await self._journal.set_state(JobState.PLACING)
        spec = self._spec
        tokenizer = await asyncio.to_thread(ChatTokenizer, Path(spec.model("actor").path))
        questions = await asyncio.to_thread(spec.prompts.open, spec.seed, spec.evaluation.size)
        prompts = OrderedPrompts(questions, tokenizer, spec.seed)
        scoring = Scoring(self._job, spec, self._around.folder(self._job), tokenizer)
        plan = self._plan = self._plan or await self._default_plan()
        self._coordinator = await self._find_coordinator(self._patience)
        await self._coordinator.release(self._job, spec.deadlines.release, keep_copies=self._start.copies)
        try:
            await scoring.start()
            placed = await self._place(plan)
            async with self._checkpoints(plan, placed) as checkpointer:
                around = self._surrounding(prompts, scoring, tokenizer, checkpointer)
                await self._loop(placed, around, checkpointer)
        except NereusError:
            await asyncio.shield(self._release(keep_copies=self.copies is not None))
            raise
        except BaseException:
            await asyncio.shield(self._release())
            raise
        else:
            await asyncio.shield(self._release())
        finally:
            await scoring.close()

    async def _loop(self, placed: PlacedJob, around: Surrounding, checkpointer: Checkpointer) -> None:
        spec, desk = self._spec, TransitionDesk(self._around)
        sampler = build_sampler(spec, placed, around)

        autopilot = await self._autopilot(desk, sampler.pool)

        def took(placed: PlacedJob, epoch: int, plan: Plan) -> Stages:
            self._epoch, self._plan = epoch, plan
            if autopilot is not None:
                autopilot.took(plan)
            checkpointer.move(*self._described(plan, placed, checkpointer.shapes))
            sampler.pool.replace(placed[ACTOR_GENERATION])
            return build_stages(spec, placed, sampler, around.prompts)

        async def ask(target: Plan, version: int) -> None:
            await desk.apply(self._job, target, due=version)

        mover = Mover(
            self._job,
            self._around.registry,
            lambda: self._coordinator,
            self._around.channels,
            self._around.moves(self._job),
            self._journal.emit,
            prepare_timeout=spec.deadlines.place,
            run_timeout=spec.deadlines.place,
            clock=self._around.clock,
        )
        leaving = Leaving(sampler.pool, spec.transitions.in_flight, spec.deadlines.generate, self._journal.emit)
        replanning = Replanning(
            mover,
            self._planned,
            ask,
            leaving,
            settle=checkpointer.close,
            took=took,
            retake=self._retake,
            autopilot=autopilot,
        )
        parts = build_parts(spec, placed, sampler, around, replanning)
        async with mover.open():
            try:
                await RlLoop(spec, parts).run(self._start.progress)
            finally:
                if autopilot is not None:
                    await autopilot.close()

    async def _autopilot(self, desk: TransitionDesk, pool: GenerationPool) -> Autopilot | None:
        """None where the job is not to adapt."""
        spec, job = self._spec, self._job
        if spec.adapt.mode == "off":
            return None
        assert self._plan is not None
        shapes = await asyncio.to_thread(shapes_of, spec)

        async def apply(target: Plan) -> str:
            return (await desk.apply(job, target)).id

        async def show(target: Plan) -> transitions_pb2.Transition:
            return await desk.show(job, target)

        async def undone(transition: str) -> tuple[bool, str]:
            record = await desk.get(job, TransitionId(transition))
            return record.state.ended and not record.state.committed, record.error_message

        around, folder = self._around, self._around.folder(job)
        hands = Hands(show, apply, undone)
        return Autopilot(
            job, spec, self._plan, shapes, around.registry, hands, self._journal.emit, folder, lambda: pool.busy_seconds
        )

    async def _place(self, plan: Plan) -> PlacedJob:
        self._epoch = await self._next_epoch()
        version, checkpoint = self._start.progress.step, self._start.checkpoint
        placed, synced = await self._coordinator.place(
            self._job,
            self._epoch,
            plan,
            self._spec,
            self._around.channels,
            version=version,
            checkpoint="" if checkpoint is None else str(checkpoint),
            from_copies=self._start.copies,
        )
        self._reached = self._start.progress
        told = {"epoch": self._epoch, "plan": json.loads(plan.to_json()), "plan_id": plan.id}
        await self._journal.set_state(JobState.RUNNING, **told)
        for report in synced:
            await self._journal.emit("sync", {"version": version, **report.told()})
        return placed

    @asynccontextmanager
    async def _checkpoints(self, plan: Plan, placed: PlacedJob) -> AsyncIterator[Checkpointer]:
        """While the block runs, and until what it has begun to write is written, however the block ends."""
        spec = self._spec
        trained = {name.model for name in placed if name.stage is Stage.TRAINING}
        shapes = {model: await asyncio.to_thread(shape_of, spec, model) for model in trained}
        checkpointer = Checkpointer(
            *self._described(plan, placed, shapes),
            self._around.checkpoints(self._job, spec),
            spec.checkpoint,
            self._journal.emit,
            steps=spec.steps,
            timeout=spec.deadlines.train,
            clock=self._around.clock,
        )
        try:
            yield checkpointer
        except BaseException:
            await asyncio.shield(self._settle(checkpointer))
            raise
        await checkpointer.close()

    def _described(
        self, plan: Plan, placed: PlacedJob, shapes: Mapping[str, ModelShape]
    ) -> tuple[Described, list[PlacedStage]]:
        trained = [stage for name, stage in placed.items() if name.stage is Stage.TRAINING]
        return Described(self._job, self._epoch, plan, self._spec.to_json(), shapes), trained

    async def _settle(self, checkpointer: Checkpointer) -> None:
        """The attempt has failed already: what happens to its last checkpoint must not hide why."""
        try:
            await checkpointer.close()
        except NereusError as error:
            log.warning("job %s: its last checkpoint failed: %s", self._job, error)

    def _surrounding(
        self,
        prompts: OrderedPrompts,
        scoring: Scoring,
        tokenizer: ChatTokenizer,
        checkpointer: Checkpointer,
    ) -> Surrounding:
        async def after_step(progress: Progress) -> None:
            self._reached = progress
            await checkpointer.after_step(progress)

        return Surrounding(
            prompts=prompts,
            tokenizer=tokenizer,
            score=scoring.score,
            play=scoring.play,
            sync=self._sync,
            emit=self._journal.emit,
            after_step=after_step,
            folder=self._around.folder(self._job),
        )

    async def _next_epoch(self) -> int:
        """One above the last that was committed, so that calls of an earlier attempt are refused."""
        try:
            return (await self._around.registry.get_plan(self._job)).epoch + 1
        except NotFound:
            return 1

    async def _sync(self, model: str, version: int) -> Synced:
        timeout = self._spec.deadlines.sync
        try:
            return await self._coordinator.sync(self._job, self._epoch, model, version, timeout)
        except (Unavailable, NotFound) as gone:
            await self._retake(gone)
        return await self._coordinator.sync(self._job, self._epoch, model, version, timeout)

    async def _retake(self, gone: NereusError) -> tuple[PlacedJob, int, Plan] | None:
        """The coordinator has gone, or another life of it does not know the job: let the next one take it over.

        None when the plan in force is the one before. Raises `gone` where it says something else.
        """
        of_it = gone.details.get("target") == self._coordinator.target
        unknown = gone.details.get("job") == self._job and "unit" not in gone.details
        if not (of_it if isinstance(gone, Unavailable) else unknown):
            raise gone
        await self._journal.emit("log", {"level": "warning", "message": f"the coordinator is gone: {gone.message}"})
        self._coordinator = await self._find_coordinator(self._spec.deadlines.place)
        known = await self._around.registry.get_plan(self._job)
        placed, _ = await self._coordinator.place(self._job, known.epoch, known.plan, self._spec, self._around.channels)
        return None if known.epoch == self._epoch else (placed, known.epoch, known.plan)

    def _planned(self, version: int) -> Plan | None:
        """The plan that the job's file wants from this version on, where that is another than the one in force."""
        assert self._plan is not None
        wanted = [merge_target(self._plan, move.plan) for move in self._spec.moves if move.after_step == version]
        return wanted[0] if wanted and wanted[0] != self._plan else None

    async def _find_coordinator(self, patience: float) -> Coordinator:
        return await find_coordinator(self._around, self._journal, self._plan, patience)

    async def _default_plan(self) -> Plan:
        devices = sorted(device.id for device in await self._around.registry.devices())
        return default_plan(devices, self._spec.model_stages)

    async def _release(self, *, keep_copies: bool = False) -> None:
        try:
            await self._coordinator.release(self._job, self._spec.deadlines.release, keep_copies=keep_copies)
        except NereusError as error:
            log.error("job %s: its units were not released: %s", self._job, error)


async def find_coordinator(
    around: Surroundings, journal: JobJournal, plan: Plan | None, patience: float
) -> Coordinator:
    """The coordinator, once it and every service that `plan` needs answer. Unavailable after `patience` seconds."""

    async def waiting(text: str) -> None:
        await journal.emit("log", {"level": "warning", "message": text})

    found = await await_services(around.registry, around.channels, needs_of(plan), patience, waiting)
    return Coordinator(found.target, around.channels.get(found.target))
