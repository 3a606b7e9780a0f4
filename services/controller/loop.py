"""The RL loop of one job: take a step's rollouts, run the rest of the workflow on them, sync, report.

Nothing here knows a plan: the stages it drives are handed in. Synchronous and asynchronous jobs run the same loop; how
far ahead of it rollouts are sampled is their source's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nereus.spec import JobSpec
from nereus_common.core.errors import JobFailed
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.rl.prompts import PromptSource
from nereus_common.rl.step_rollouts import rollouts_file
from nereus_common.rpc.together import together

from .checkpoints import Emit
from .evaluation import Evaluator
from .progress import Progress
from .rollouts import RolloutSource
from .sampler import Decode
from .step import StepData, StepRunner
from .step_report import samples_file, step_event, write_samples
from .synced import Synced
from .training import Updated

AfterStep = Callable[[Progress], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Stages:
    """What the loop drives on the units of one plan, beside the rollouts."""

    runner: StepRunner
    evaluator: Evaluator


@dataclass(frozen=True, slots=True)
class Replanned:
    """The job under another plan: its stages, and what brought all of them to the version of the boundary."""

    stages: Stages
    synced: Mapping[str, Synced]


class Boundaries(Protocol):
    """Where the loop lets the job's plan be changed."""

    async def before_step(self, step: int) -> None: ...

    async def cross(self, version: int) -> Replanned | None:
        """After the last update of a step and before its weight sync, which a change of plan replaces; None: nothing
        was changed. Rollouts in flight go on, here or on the units that take the place of theirs."""

    async def after_step(self, data: StepData, synced: Mapping[str, Synced]) -> None:
        """A step is done and told."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives. `rollouts(start)`: a source that begins there. `sync(model, version)` brings every other
    unit of a model to `version`. `after_step` is awaited between steps, when all units hold the same version."""

    rollouts: Callable[[Progress], RolloutSource]
    stages: Stages
    boundaries: Boundaries
    prompts: PromptSource
    decode: Decode
    sync: Callable[[str, int], Awaitable[Synced]]
    emit: Emit
    after_step: AfterStep
    folder: Path


class RlLoop:
    """One job. The version served after step s is s + 1: it counts finished steps."""

    def __init__(self, spec: JobSpec, parts: Parts) -> None:
        self._spec = spec
        self._parts = parts
        self._stages = parts.stages

    async def run(self, start: Progress) -> None:
        """From `start` to the last step; raises what any part raises."""
        evaluation = self._spec.evaluation
        if evaluation.before and start.step == 0:
            await self._evaluate("before", 0)
        if start.step < self._spec.steps:
            source = self._parts.rollouts(start)
            await together([source.run(), self._steps(source, start)])
        if evaluation.after:
            await self._evaluate("after", self._spec.steps)

    async def _steps(self, source: RolloutSource, progress: Progress) -> None:
        every, steps = self._spec.evaluation.every, self._spec.steps
        while progress.step < steps:
            progress = await self._step(source, progress)
            await self._parts.after_step(progress)
            if every and progress.step % every == 0 and progress.step < steps:
                await self._evaluate("step", progress.step)
        await source.close()

    async def _step(self, source: RolloutSource, progress: Progress) -> Progress:
        watch = Stopwatch()
        with watch.phase("total"):
            await self._parts.boundaries.before_step(progress.step)
            with watch.phase("generation"):
                rollouts = await source.take(progress.step)
            data = StepData.of(progress.step, rollouts, watch)
            await self._stages.runner.run(data)
            with watch.phase("sync"):
                synced = await self._sync(source, progress.step + 1)
        await asyncio.to_thread(self._keep, data)
        await self._parts.emit("step", step_event(data, synced))
        await self._parts.boundaries.after_step(data, synced)
        self._check_gap(data.step, data.updated["actor"])
        return Progress(progress.step + 1, rollouts.next_position)

    async def _sync(self, source: RolloutSource, version: int) -> dict[str, Synced]:
        """Bring every trained model's other units to `version`, under the plan in force or under the next one;
        generation starts nothing meanwhile."""
        await source.pause()
        changed = await self._parts.boundaries.cross(version)
        if changed is None:
            synced = {model: await self._parts.sync(model, version) for model in self._spec.workflow.trained}
        else:
            synced = dict(changed.synced)
            self._stages = changed.stages
        await source.serve(version)
        return synced

    def _keep(self, data: StepData) -> None:
        """Write what the job keeps of the step's rollouts."""
        kept, folder = self._spec.rollouts, self._parts.folder
        if kept.record:
            data.rollouts.save(rollouts_file(folder / "rollouts", data.step))
        if kept.samples:
            path = samples_file(folder, data.step)
            write_samples(path, data, self._parts.prompts, self._parts.decode, kept.samples)

    async def _evaluate(self, when: str, version: int) -> None:
        async for found in self._stages.evaluator.run(self._spec.evaluation.modes):
            await self._parts.emit("evaluation", {"when": when, "step": version, **found})

    def _check_gap(self, step: int, updated: Updated) -> None:
        bound, gap = self._spec.max_logprob_gap, updated.metrics.get("logprob_gap")
        if bound is not None and gap is not None and not gap <= bound:
            raise JobFailed(
                f"step {step}: the mean |log-prob gap| between trainer and sampler is {gap:.4g}, above the job's bound "
                f"of {bound:.4g}",
                remedy="the two sides do not compute the same policy: compare dtypes, heads and sampling transforms",
                step=step,
            )
