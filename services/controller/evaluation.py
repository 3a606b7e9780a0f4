"""Held-out accuracy: every held-out prompt answered once per mode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from nereus_common.rl.prompts import Prompt, PromptSource
from nereus_common.rl.statistics import confidence
from nereus_common.rl.step_rollouts import ScoredGroup, StepRollouts

from .placed import PlacedUnit
from .sampler import GroupSampler
from .step import StepRunner


class Evaluator:
    """`sampler` is that of training; here it samples once, without a baseline."""

    def __init__(self, sampler: GroupSampler, runner: StepRunner, prompts: PromptSource) -> None:
        self._sampler = replace(sampler, samples=1, baseline=False)
        self._runner = runner
        self._prompts = prompts

    async def run(self, modes: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
        """Mode, mean, 95% interval and n, for `sampled` (as in training) and `greedy`; nothing without prompts."""
        prompts = self._prompts.heldout()
        if not prompts:
            return
        for mode in modes:
            groups = await self._groups(prompts, mode)
            rollouts = StepRollouts.of(groups, 0)
            found = confidence(await self._runner.score(rollouts))
            yield {"mode": mode, "mean": found.mean, "low": found.low, "high": found.high, "n": found.n}

    async def _groups(self, prompts: Sequence[Prompt], mode: str) -> list[ScoredGroup]:
        sampler = self._sampler
        if mode == "greedy":
            sampler = replace(sampler, sampling=sampler.sampling.greedy)
        found: list[ScoredGroup | None] = [None] * len(prompts)

        async def answer(index: int, prompt: Prompt, unit: PlacedUnit) -> None:
            found[index] = await sampler.group(unit, prompt)

        work = [lambda unit, i=i, p=p: answer(i, p, unit) for i, p in enumerate(prompts)]
        await sampler.pool.spread(work, 1)
        return [group for group in found if group is not None]
