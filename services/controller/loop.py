"""The RL loop of one job: rollouts → rewards → advantages → update → weight sync, step by step.

Nothing here knows a plan: the stages it drives are handed in. What happens is told through `emit`, in the events of
docs/events.md.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nereus.spec import JobSpec
from nereus_common.core.errors import JobFailed
from nereus_common.rl.advantages import group_advantages
from nereus_common.rl.assembly import Group, assemble
from nereus_common.rl.order import step_positions
from nereus_common.rl.prompts import Prompt, PromptSource
from nereus_common.rl.rewards import RewardInput
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.statistics import wilson
from nereus_common.rl.weights import loss_weights

from .generation import GenerationPool, Sampling
from .progress import Progress
from .training import InferenceGroup, TrainingGroup, Update, Updated

Emit = Callable[[str, Mapping[str, Any]], Awaitable[None]]
Score = Callable[[Sequence[RewardInput]], Awaitable[Sequence[float]]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Synced:
    """What a weight sync moved; `bytes_moved` as counted at the transport, `phases` in seconds."""

    bytes_moved: int
    bytes_needed: int
    seconds: float
    phases: Mapping[str, float]

    def told(self) -> dict[str, Any]:
        """As events tell it."""
        return {
            "bytes_moved": self.bytes_moved,
            "bytes_needed": self.bytes_needed,
            "seconds": self.seconds,
            "phases": dict(self.phases),
        }


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives. `sync(version)` brings every other unit of the actor to `version`."""

    generation: GenerationPool
    training: TrainingGroup
    reference: InferenceGroup | None
    prompts: PromptSource
    score: Score
    decode: Decode
    sync: Callable[[int], Awaitable[Synced]]
    emit: Emit
    after_step: Callable[[Progress], Awaitable[None]]
    stop_token_ids: tuple[int, ...]


class Stopwatch:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


class RlLoop:
    """One synchronous job. The version served at step s is s: it counts finished updates."""

    def __init__(self, spec: JobSpec, parts: Parts) -> None:
        self._spec = spec
        self._parts = parts

    async def run(self, start: Progress) -> None:
        evaluation = self._spec.evaluation
        if evaluation.before and start.step == 0:
            await self._evaluate("before", 0)
        for step in range(start.step, self._spec.steps):
            await self._step(step)
            done = step + 1
            await self._parts.after_step(Progress(done, done * self._spec.algorithm.groups_per_step))
            if evaluation.every and done % evaluation.every == 0 and done < self._spec.steps:
                await self._evaluate("step", done)
        if evaluation.after:
            await self._evaluate("after", self._spec.steps)

    async def _step(self, step: int) -> None:
        watch = Stopwatch()
        with watch.phase("total"):
            with watch.phase("generation"):
                prompts, groups = await self._generate(step)
            with watch.phase("reward"):
                batch = await self._rewarded(prompts, groups)
            if self._parts.reference is not None:
                with watch.phase("reference"):
                    scored = await self._parts.reference.logprobs(batch, self._spec.sampling.temperature)
                batch = batch.with_columns(reference=scored)
            with watch.phase("training"):
                updated = await self._update(step, batch)
            with watch.phase("sync"):
                synced = await self._parts.sync(updated.version)
        await self._parts.emit("step", _step_event(step, batch, updated, synced, watch.seconds))
        self._check_gap(step, updated)

    async def _generate(self, step: int) -> tuple[list[Prompt], list[Group]]:
        spec = self._spec
        prompts = self._parts.prompts.batch(step_positions(step, spec.algorithm.groups_per_step))
        sampling = self._sampling(step, spec.algorithm.samples_per_group, spec.sampling.temperature)
        return prompts, await self._parts.generation.generate(prompts, sampling)

    def _sampling(self, version: int, samples: int, temperature: float) -> Sampling:
        spec = self._spec.sampling
        greedy = temperature == 0
        return Sampling(
            samples=samples,
            temperature=temperature,
            top_p=1.0 if greedy else spec.top_p,
            top_k=0 if greedy else spec.top_k,
            max_tokens=spec.max_tokens,
            stop_token_ids=self._parts.stop_token_ids,
            version=version,
        )

    async def _rewarded(self, prompts: Sequence[Prompt], groups: Sequence[Group]) -> RolloutBatch:
        """The batch with its rewards and advantages, both of every sample."""
        batch = assemble(groups)
        rewards = np.asarray(await self._parts.score(self._reward_inputs(prompts, groups)), np.float32)
        batch = batch.with_columns(rewards=rewards)
        algorithm = self._spec.algorithm
        return batch.with_columns(
            advantages=group_advantages(batch, scale_by_std=bool(algorithm.estimator_options().get("scale_by_std"))),
            weights=loss_weights(batch, 1, algorithm.aggregation, longest=self._spec.sampling.max_tokens),
        )

    def _reward_inputs(self, prompts: Sequence[Prompt], groups: Sequence[Group]) -> list[RewardInput]:
        return [
            RewardInput(
                position=prompt.position,
                sample=number,
                prompt=prompt.question.text,
                response=self._parts.decode(completion.token_ids),
                answer=prompt.question.answer,
                metadata=prompt.question.metadata,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=completion.token_ids,
                finished=completion.finished,
            )
            for prompt, group in zip(prompts, groups, strict=True)
            for number, completion in enumerate(group.completions)
        ]

    async def _update(self, step: int, batch: RolloutBatch) -> Updated:
        spec = self._spec
        update = Update(
            step=step,
            loss=spec.algorithm.loss_options(),
            learning_rate=spec.optimizer.learning_rate_at(step, spec.steps),
            max_grad_norm=spec.optimizer.max_grad_norm,
            temperature=spec.sampling.temperature,
        )
        return await self._parts.training.step(batch, update)

    def _check_gap(self, step: int, updated: Updated) -> None:
        bound, gap = self._spec.max_logprob_gap, updated.metrics["logprob_gap"]
        if bound is not None and not gap <= bound:
            raise JobFailed(
                f"step {step}: the mean |log-prob gap| between trainer and sampler is {gap:.4g}, above the job's bound "
                f"of {bound:.4g}",
                remedy="the two sides do not compute the same policy: compare dtypes, heads and sampling transforms",
                step=step,
            )

    async def _evaluate(self, when: Literal["before", "after", "step"], version: int) -> None:
        prompts = self._parts.prompts.heldout()
        if not prompts:
            return
        for mode in self._spec.evaluation.modes:
            temperature = self._spec.sampling.temperature if mode == "sampled" else 0.0
            groups = await self._parts.generation.generate(prompts, self._sampling(version, 1, temperature))
            scores = await self._parts.score(self._reward_inputs(prompts, groups))
            found = wilson(float(sum(scores)), len(scores))
            await self._parts.emit(
                "evaluation",
                {
                    "when": when,
                    "step": version,
                    "mode": mode,
                    "mean": found.mean,
                    "low": found.low,
                    "high": found.high,
                    "n": found.n,
                },
            )


def _step_event(
    step: int, batch: RolloutBatch, updated: Updated, synced: Synced, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The payload of a `step` event, see docs/events.md."""
    lengths = batch.response_lengths
    return {
        **{name: value for name, value in updated.metrics.items() if not name.startswith("logprob_gap")},
        "step": step,
        "version": updated.version,
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        "tokens": int(lengths.sum()),
        "response_length_mean": float(lengths.mean()),
        "finished_fraction": float(batch.finished.mean()),
        "logprob_gap_mean": updated.metrics["logprob_gap"],
        "logprob_gap_max": updated.metrics["logprob_gap_max"],
        "seconds": dict(seconds),
        "training_seconds": dict(updated.seconds),
        "training_peak_memory_bytes": updated.peak_memory_bytes,
        "sync": synced.told(),
    }
