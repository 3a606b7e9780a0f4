"""One step of the workflow: its tasks run as soon as what they read is there, and share devices one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.spec import JobSpec
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.workflow import Task, Work, Workflow
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.planning.step_time import place_of
from nereus_common.rl.advantages import estimate
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.shaping import drop_groups, equal_reward_groups, mask_truncated, overlong_penalty
from nereus_common.rl.step_rollouts import StepRollouts
from nereus_common.rl.weights import cut_minibatches, loss_weights
from nereus_common.rpc.together import together

from .inference import InferenceGroup
from .training import TrainingGroup, Update, Updated

PHASES: Mapping[Work, str] = {
    Work.SCORES: "reward",
    Work.TOTAL: "reward",
    Work.LOGPROBS: "reference",
    Work.VALUES: "values",
    Work.ADVANTAGES: "advantages",
    Work.UPDATE: "training",
}
"""What the seconds of a task are counted as."""
Scored = dict[str, NDArray[np.float32]]


@dataclass(slots=True)
class StepData:
    """What is known of a step while its tasks run. `scores` [N] and `baseline_scores` [G] by reward.

    `flat` [G]: groups whose rewards, before long responses are punished, are all equal.
    """

    step: int
    rollouts: StepRollouts
    batch: RolloutBatch
    scores: Scored
    baseline_scores: Scored
    flat: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    updated: dict[str, Updated] = field(default_factory=dict)
    watch: Stopwatch = field(default_factory=Stopwatch)
    task_seconds: dict[str, float] = field(default_factory=dict)
    """Of tasks that a model computes, without the wait for a device that another one holds."""

    @classmethod
    def of(cls, step: int, rollouts: StepRollouts, watch: Stopwatch) -> StepData:
        given = dict(rollouts.scores), dict(rollouts.baseline_scores)
        return cls(step, rollouts, rollouts.batch, *given, watch=watch)


class StepRunner:
    """Runs what follows the rollouts. `training` and `inference`: the placed stages by model."""

    def __init__(
        self,
        spec: JobSpec,
        devices: Mapping[ModelStage, tuple[DeviceId, ...]],
        training: Mapping[str, TrainingGroup],
        inference: Mapping[str, InferenceGroup],
    ) -> None:
        self._spec = spec
        self._workflow: Workflow = spec.workflow
        self._devices = devices
        self._locks = {place: asyncio.Lock() for found in devices.values() for place in map(place_of, found)}
        self._training = training
        self._inference = inference
        self._works: Mapping[Work, Callable[[Task, StepData], Awaitable[None]]] = {
            Work.SCORES: self._score,
            Work.TOTAL: self._total,
            Work.LOGPROBS: self._score_tokens,
            Work.VALUES: self._score_tokens,
            Work.ADVANTAGES: self._advantages,
            Work.UPDATE: self._update,
        }

    async def run(self, data: StepData) -> None:
        """All tasks but sampling and reward functions, whose results `data` brings. Raises what a task raises."""
        for wave in self._workflow.waves():
            await together(self._task(task, data) for task in wave if task.work in self._works)

    async def score(self, rollouts: StepRollouts) -> NDArray[np.float32]:
        """[N] the total rewards of rollouts outside a step."""
        data = StepData.of(0, rollouts, Stopwatch())
        for wave in self._workflow.waves():
            await together(self._task(task, data) for task in wave if task.work in (Work.SCORES, Work.TOTAL))
        return data.batch.rewards

    async def _task(self, task: Task, data: StepData) -> None:
        async with self._alone(task.stage):
            critics = task.work is Work.UPDATE and task.stage is not None and task.stage.model != "actor"
            with data.watch.phase("critic_training" if critics else PHASES[task.work]):
                started = time.monotonic()
                await self._works[task.work](task, data)
                if task.stage is not None:
                    data.task_seconds[task.name] = time.monotonic() - started

    @asynccontextmanager
    async def _alone(self, stage: ModelStage | None) -> AsyncIterator[None]:
        """Hold what the stage computes on; always in one order, so that two tasks never wait for each other."""
        async with AsyncExitStack() as held:
            for place in sorted(set(map(place_of, self._devices[stage]))) if stage else ():
                await held.enter_async_context(self._locks[place])
            yield

    async def _score(self, task: Task, data: StepData) -> None:
        assert task.stage is not None
        group, temperature = self._inference[task.stage.model], self._spec.sampling.temperature
        data.scores[task.stage.model] = await group.run(Work.SCORES, data.rollouts.batch, temperature)
        if data.rollouts.baseline is not None:
            greedy = await group.run(Work.SCORES, data.rollouts.baseline, temperature)
            data.baseline_scores[task.stage.model] = greedy

    async def _total(self, task: Task, data: StepData) -> None:
        batch, greedy = data.rollouts.batch, data.rollouts.baseline
        rewards = self._weighed(batch, data.scores)
        data.flat = equal_reward_groups(batch.with_columns(rewards=rewards))
        data.batch = data.batch.with_columns(rewards=rewards + self._overlong(batch))
        if greedy is not None:
            baseline = self._weighed(greedy, data.baseline_scores) + self._overlong(greedy)
            data.batch = data.batch.with_columns(baseline=baseline)

    def _weighed(self, batch: RolloutBatch, scores: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """[N] the environment's reward and the weighed scores."""
        total = np.nan_to_num(batch.rewards, nan=0.0).astype(np.float64)
        for reward in self._spec.rewards:
            total += reward.weight * scores[reward.label].astype(np.float64)
        return total.astype(np.float32)

    def _overlong(self, batch: RolloutBatch) -> NDArray[np.float32]:
        """[N] the punishment of long responses, at most 0."""
        given = self._spec.algorithm.overlong
        if given is None:
            return np.zeros(batch.sequences, np.float32)
        return overlong_penalty(batch.response_lengths, given.length, given.buffer, given.penalty)

    async def _score_tokens(self, task: Task, data: StepData) -> None:
        """Fill the column that the task writes, one number per response token."""
        assert task.stage is not None
        (column,) = task.writes
        group = self._inference[task.stage.model]
        found = await group.run(task.work, data.rollouts.batch, self._spec.sampling.temperature)
        data.batch = data.batch.with_columns(**{str(column): found})

    async def _advantages(self, task: Task, data: StepData) -> None:
        data.batch = await asyncio.to_thread(prepared, data.batch, data.flat, self._spec)

    async def _update(self, task: Task, data: StepData) -> None:
        assert task.stage is not None
        data.updated[task.stage.model] = await self._training[task.stage.model].step(
            data.batch, self._updates(task.stage.model, data.step)
        )

    def _updates(self, model: str, step: int) -> Update:
        spec = self._spec
        optimizer = spec.optimizer_of(model)
        return Update(
            step=step,
            loss=self._loss_options(model),
            learning_rate=optimizer.learning_rate_at(step, spec.steps),
            max_grad_norm=optimizer.max_grad_norm,
            temperature=spec.sampling.temperature,
            epochs=spec.algorithm.epochs,
            minibatches=spec.algorithm.minibatches,
        )

    def _loss_options(self, model: str) -> Mapping[str, Any]:
        algorithm = self._spec.algorithm
        if model == "actor":
            return algorithm.loss_options()
        assert algorithm.name == "ppo", "only PPO trains another model"
        return algorithm.value_loss_options()


def prepared(batch: RolloutBatch, flat: NDArray[np.bool_], spec: JobSpec) -> RolloutBatch:
    """The batch as it is trained on: advantages of all its groups, then the shares of what counts in the loss."""
    algorithm = spec.algorithm
    if algorithm.mask_truncated:
        batch = mask_truncated(batch)
    batch = estimate(batch, algorithm.estimator_options())
    if algorithm.name == "grpo" and algorithm.equal_groups == "drop":
        batch = drop_groups(batch, flat)
    batch = batch.with_columns(minibatch=cut_minibatches(batch.groups, algorithm.minibatches))
    longest = spec.sampling.max_tokens if spec.environment is None else spec.environment.max_tokens
    weights = loss_weights(batch, algorithm.minibatches, algorithm.aggregation, longest=longest)
    return batch.with_columns(weights=weights)
