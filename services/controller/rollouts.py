"""Where a step's rollouts come from: sampled while the job trains, or read from a recording."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Protocol

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.rl.flow import RolloutFlow
from nereus_common.rl.prompts import PromptSource
from nereus_common.rl.step_rollouts import ScoredGroup, StepRollouts, rollouts_file
from nereus_common.rpc.together import together

from .placed import PlacedUnit
from .sampler import GroupSampler


class RolloutSource(Protocol):
    """`run` works beside the loop until `close`; `pause` and `serve` enclose a weight sync, or a transition: that waits
    with `drain` until nothing is in flight, and afterwards samples with what `move` is given."""

    async def run(self) -> None: ...
    async def take(self, step: int) -> StepRollouts: ...
    async def pause(self) -> None: ...
    async def serve(self, version: int) -> None: ...
    async def drain(self) -> None: ...
    async def move(self, sampler: GroupSampler) -> None: ...
    async def close(self) -> None: ...


class LiveRollouts:
    """Keeps every unit busy with what the flow lets be started. `timeout`: seconds to wait for a step's groups."""

    def __init__(
        self,
        flow: RolloutFlow[ScoredGroup],
        sampler: GroupSampler,
        prompts: PromptSource,
        timeout: float,
    ) -> None:
        self._flow = flow
        self._sampler = sampler
        self._prompts = prompts
        self._timeout = timeout
        self._news = asyncio.Condition()
        self._closed = False

    async def run(self) -> None:
        """Raises what sampling or scoring a group raises."""
        while not self._closed:
            sampler = self._sampler
            await together(self._lane(sampler, unit) for unit in sampler.pool.lanes(sampler.samples))

    async def take(self, step: int) -> StepRollouts:
        """The groups of `step`, once all are whole. DeadlineExceeded names what is missing."""
        try:
            async with asyncio.timeout(self._timeout), self._news:
                while (taken := self._flow.take()) is None:
                    await self._news.wait()
                self._news.notify_all()
        except TimeoutError:
            missing = self._flow.missing
            raise DeadlineExceeded(
                f"step {step}: {len(missing)} of {self._flow.pace.groups} groups, the one at position {missing[0]} "
                f"among them, were not whole after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for fewer or shorter responses",
                step=step,
            ) from None
        return StepRollouts.of(taken.groups, taken.next_position)

    async def pause(self) -> None:
        self._flow.paused = True

    async def serve(self, version: int) -> None:
        async with self._news:
            self._flow.serve(version)
            self._news.notify_all()

    async def drain(self) -> None:
        """Return once no group is in flight. DeadlineExceeded names those that are."""
        try:
            async with asyncio.timeout(self._timeout), self._news:
                while self._flow.running:
                    await self._news.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the groups at {', '.join(map(str, self._flow.running))} were not whole after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for shorter responses",
            ) from None

    async def move(self, sampler: GroupSampler) -> None:
        """Groups are started with `sampler` from now on; its units are other ones."""
        async with self._news:
            self._sampler = sampler
            self._news.notify_all()

    async def close(self) -> None:
        """No group is started any more; `run` ends with those in flight."""
        async with self._news:
            self._closed = True
            self._news.notify_all()

    async def _lane(self, sampler: GroupSampler, unit: PlacedUnit) -> None:
        while (position := await self._next(sampler)) is not None:
            prompt = await asyncio.to_thread(self._prompts.at, position)
            scored = await sampler.group(unit, prompt)
            async with self._news:
                self._flow.finish(position, scored, oldest=scored.oldest_version, flat=is_flat(scored))
                self._news.notify_all()

    async def _next(self, sampler: GroupSampler) -> int | None:
        """The next position to sample; None once there is none for this sampler."""
        async with self._news:
            while not self._closed and self._sampler is sampler:
                position = self._flow.start()
                if position is not None:
                    return position
                await self._news.wait()
        return None


class RecordedRollouts:
    """The rollouts that an earlier job kept below `folder`, step by step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def take(self, step: int) -> StepRollouts:
        """NotFound when the recording ends before `step`."""
        return await asyncio.to_thread(StepRollouts.load, rollouts_file(self._folder, step))

    async def run(self) -> None:
        """Nothing is sampled."""

    async def pause(self) -> None:
        """Nothing is sampled."""

    async def serve(self, version: int) -> None:
        """Nothing is sampled."""

    async def drain(self) -> None:
        """Nothing is sampled."""

    async def move(self, sampler: GroupSampler) -> None:
        """Nothing is sampled."""

    async def close(self) -> None:
        """Nothing is sampled."""


def is_flat(scored: ScoredGroup) -> bool:
    """Whether every completion of the group got the same scores, so that no advantage can differ from 0."""
    rewards = [completion.reward for completion in scored.group.completions]
    columns = [*scored.scores.values(), [0.0 if math.isnan(reward) else reward for reward in rewards]]
    return all(len(set(column)) == 1 for column in columns)
