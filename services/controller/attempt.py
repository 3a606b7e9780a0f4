"""One attempt at a job: wait for the services, clear away what an earlier one left, place, run the loop, release."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nereus.spec import JobSpec
from nereus_common.core.errors import NereusError, NotFound
from nereus_common.core.ids import JobId, Stage
from nereus_common.core.plan import Plan
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.planning.default import default_plan
from nereus_common.registry import JobState
from nereus_common.rl.prompts import OrderedPrompts
from nereus_common.state.architecture import ModelShape

from .attempts import Start
from .checkpoints import Checkpointer, Described
from .coordinator import Coordinator
from .journal import JobJournal
from .loop import RlLoop
from .parts import Surrounding, build_parts
from .placed import PlacedJob
from .readiness import await_services, needs_of
from .scoring import Scoring
from .surroundings import Surroundings
from .synced import Synced

log = logging.getLogger(__name__)


class Attempt:
    """Its units have an epoch that no earlier attempt had. Whatever happens, they are released.

    `patience`: seconds that it waits for services that are not there.
    """

    def __init__(
        self, job: JobId, spec: JobSpec, around: Surroundings, journal: JobJournal, start: Start, patience: float
    ) -> None:
        self._job = job
        self._spec = spec
        self._around = around
        self._journal = journal
        self._start = start
        self._patience = patience
        self._epoch = 0

    async def run(self) -> None:
        """Returns when all steps are done."""
        await self._journal.set_state(JobState.PLACING)
        spec = self._spec
        tokenizer = await asyncio.to_thread(ChatTokenizer, Path(spec.model("actor").path))
        questions = await asyncio.to_thread(spec.prompts.open, spec.seed, spec.evaluation.size)
        prompts = OrderedPrompts(questions, tokenizer, spec.seed)
        scoring = Scoring(self._job, spec, self._around.folder(self._job), tokenizer)
        plan = spec.explicit_plan or await self._default_plan()
        coordinator = await self._coordinator(plan)
        await coordinator.release(self._job, spec.deadlines.release)
        try:
            await scoring.start()
            placed = await self._place(coordinator, plan)
            async with self._checkpoints(plan, placed) as checkpointer:
                around = self._surrounding(coordinator, prompts, scoring, tokenizer, checkpointer)
                await RlLoop(spec, build_parts(spec, placed, around)).run(self._start.progress)
        finally:
            await scoring.close()
            await asyncio.shield(self._release(coordinator))

    async def _place(self, coordinator: Coordinator, plan: Plan) -> PlacedJob:
        self._epoch = await self._next_epoch()
        version, checkpoint = self._start.progress.step, self._start.checkpoint
        placed, synced = await coordinator.place(
            self._job,
            self._epoch,
            plan,
            self._spec,
            self._around.channels,
            version=version,
            checkpoint="" if checkpoint is None else str(checkpoint),
        )
        told = {"epoch": self._epoch, "plan": json.loads(plan.to_json()), "plan_id": plan.id}
        await self._journal.set_state(JobState.RUNNING, **told)
        for report in synced:
            await self._journal.emit("sync", {"version": version, **report.told()})
        return placed

    @asynccontextmanager
    async def _checkpoints(self, plan: Plan, placed: PlacedJob) -> AsyncIterator[Checkpointer]:
        """While the block runs, and until what it has begun to write is written, however the block ends."""
        spec = self._spec
        trained = [stage for name, stage in placed.items() if name.stage is Stage.TRAINING]
        shapes = {stage.name.model: await _shape(spec, stage.name.model) for stage in trained}
        checkpointer = Checkpointer(
            Described(self._job, self._epoch, plan, spec.to_json(), shapes),
            trained,
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

    async def _settle(self, checkpointer: Checkpointer) -> None:
        """The attempt has failed already: what happens to its last checkpoint must not hide why."""
        try:
            await checkpointer.close()
        except NereusError as error:
            log.warning("job %s: its last checkpoint failed: %s", self._job, error)

    def _surrounding(
        self,
        coordinator: Coordinator,
        prompts: OrderedPrompts,
        scoring: Scoring,
        tokenizer: ChatTokenizer,
        checkpointer: Checkpointer,
    ) -> Surrounding:
        async def sync(model: str, version: int) -> Synced:
            return await coordinator.sync(self._job, self._epoch, model, version, self._spec.deadlines.sync)

        return Surrounding(
            prompts=prompts,
            tokenizer=tokenizer,
            score=scoring.score,
            play=scoring.play,
            sync=sync,
            emit=self._journal.emit,
            after_step=checkpointer.after_step,
            folder=self._around.folder(self._job),
        )

    async def _next_epoch(self) -> int:
        """One above the last that was committed, so that calls of an earlier attempt are refused."""
        try:
            return (await self._around.registry.get_plan(self._job)).epoch + 1
        except NotFound:
            return 1

    async def _coordinator(self, plan: Plan | None) -> Coordinator:
        return await find_coordinator(self._around, self._journal, plan, self._patience)

    async def _default_plan(self) -> Plan:
        devices = sorted(device.id for device in await self._around.registry.devices())
        return default_plan(devices, self._spec.model_stages)

    async def _release(self, coordinator: Coordinator) -> None:
        try:
            await coordinator.release(self._job, self._spec.deadlines.release)
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


async def _shape(spec: JobSpec, model: str) -> ModelShape:
    """Of a model that has been placed, so its config is known to be good."""
    path = Path(spec.model(model).path) / "config.json"
    return ModelShape.from_config(json.loads(await asyncio.to_thread(path.read_text)), spec.head(model))
