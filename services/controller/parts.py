"""Puts together what the loop drives, from a job's spec and the units that were placed for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from nereus.spec import JobSpec
from nereus_common.core.ids import Stage
from nereus_common.core.workflow import ACTOR_GENERATION
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.rl.flow import Pace, RolloutFlow
from nereus_common.rl.prompts import PromptSource
from nereus_common.rl.step_rollouts import ScoredGroup

from .checkpoints import Emit
from .evaluation import Evaluator
from .generation import GenerationPool, Sampling
from .inference import InferenceGroup
from .loop import AfterStep, Boundaries, Parts, Stages
from .placed import PlacedJob
from .progress import Progress
from .rollouts import LiveRollouts, RecordedRollouts, RolloutSource
from .sampler import GroupSampler, Play, Score
from .step import StepRunner
from .synced import Synced
from .training import TrainingGroup


@dataclass(frozen=True, slots=True)
class Surrounding:
    """What the job's loop needs beside its units. `play` is None where no environment takes part."""

    prompts: PromptSource
    tokenizer: ChatTokenizer
    score: Score
    play: Play | None
    sync: Callable[[str, int], Awaitable[Synced]]
    emit: Emit
    after_step: AfterStep
    folder: Path


def build_stages(spec: JobSpec, placed: PlacedJob, sampler: GroupSampler, prompts: PromptSource) -> Stages:
    """For the job as it is placed now. The sampler is that of the whole attempt: its pool follows the units."""
    runner = _runner(spec, placed)
    return Stages(runner, Evaluator(sampler, runner, prompts))


def build_parts(
    spec: JobSpec, placed: PlacedJob, sampler: GroupSampler, around: Surrounding, boundaries: Boundaries
) -> Parts:
    def rollouts(start: Progress) -> RolloutSource:
        if spec.rollouts.replay is not None:
            return RecordedRollouts(spec.rollouts.replay)
        flow: RolloutFlow[ScoredGroup] = RolloutFlow(_pace(spec), start.step, start.position, start.step)
        return LiveRollouts(flow, sampler, around.prompts, spec.deadlines.generate)

    return Parts(
        rollouts=rollouts,
        stages=build_stages(spec, placed, sampler, around.prompts),
        boundaries=boundaries,
        prompts=around.prompts,
        decode=around.tokenizer.decode,
        sync=around.sync,
        emit=around.emit,
        after_step=around.after_step,
        folder=around.folder,
    )


def _pace(spec: JobSpec) -> Pace:
    algorithm = spec.algorithm
    replace = algorithm.name == "grpo" and algorithm.equal_groups == "replace"
    return Pace(algorithm.groups_per_step, spec.steps, spec.staleness, replace)


def build_sampler(spec: JobSpec, placed: PlacedJob, around: Surrounding) -> GroupSampler:
    deadlines = spec.deadlines
    patience = deadlines.generate + 2 * deadlines.place  # a drain, a transition, and its undoing
    sampling = Sampling(
        temperature=spec.sampling.temperature,
        top_p=spec.sampling.top_p,
        top_k=spec.sampling.top_k,
        max_tokens=spec.sampling.max_tokens,
        stop_token_ids=(around.tokenizer.eos_token_id,),
        across_versions=spec.asynchronous is not None and spec.asynchronous.partial,
    )
    return GroupSampler(
        pool=GenerationPool(placed[ACTOR_GENERATION], deadlines.generate, patience),
        sampling=sampling,
        samples=spec.algorithm.samples_per_group,
        score=around.score,
        decode=around.tokenizer.decode,
        play=around.play,
        baseline=spec.algorithm.needs_baseline,
    )


def _runner(spec: JobSpec, placed: PlacedJob) -> StepRunner:
    deadlines = spec.deadlines
    return StepRunner(
        spec,
        {name: stage.plan.devices for name, stage in placed.items()},
        {
            name.model: TrainingGroup(stage, deadlines.train)
            for name, stage in placed.items()
            if name.stage is Stage.TRAINING
        },
        {
            name.model: InferenceGroup(stage, deadlines.score)
            for name, stage in placed.items()
            if name.stage is Stage.INFERENCE
        },
    )
