"""Where a step's rollouts come from: sampled while the job trains, or read from a recording."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Protocol

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.rl.flow import RolloutFlow, Taken
from nereus_common.rl.prompts import PromptSource
from nereus_common.rl.step_rollouts import ScoredGroup, StepRollouts, rollouts_file
from nereus_common.rpc.together import first_cause

from .generation import Requeued
from .placed import PlacedUnit
from .sampler import GroupSampler


class RolloutSource(Protocol):
    """`run` works beside the loop until `close`; `pause` and `serve` enclose a weight sync or a transition: nothing is
    begun meanwhile, and what is in flight goes on."""

    async def run(self) -> None: ...
    async def take(self, step: int) -> StepRollouts: ...
    async def pause(self) -> None: ...
    async def serve(self, version: int) -> None: ...
    async def close(self) -> None: ...


class LiveRollouts:
    """Keeps every unit busy with what the flow lets be started, also when other units take the place of some.

    `timeout`: seconds to wait for a step's groups.
    """

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
        self._failed: BaseException | None = None
        """What ended `run`."""
        self._on: dict[int, PlacedUnit] = {}
        """Where each group in flight was begun, by its position."""

    async def run(self) -> None:
        """Raises what sampling or scoring a group raises."""
        try:
            async with asyncio.TaskGroup() as groups:
                while (begun := await self._next()) is not None:
                    groups.create_task(self._group(*begun))
        except BaseExceptionGroup as failed:
            cause = first_cause(failed)
            async with self._news:
                self._failed = cause
                self._news.notify_all()
            raise cause from None

    async def take(self, step: int) -> StepRollouts:
        """The groups of `step`, once all are whole. DeadlineExceeded names what is missing; where `run` has failed, it
        is what `run` raised: nobody brings those that are missing then."""
        try:
            async with asyncio.timeout(self._timeout), self._news:
                taken = await self._taken()
        except TimeoutError:
            missing = self._flow.missing
            raise DeadlineExceeded(
                f"step {step}: {len(missing)} of {self._flow.pace.groups} groups, the one at position {missing[0]} "
                f"among them, were not whole after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for fewer or shorter responses",
                step=step,
            ) from None
        return StepRollouts.of(taken.groups, taken.next_position)

    async def _taken(self) -> Taken[ScoredGroup]:
        """With `_news` held."""
        while (taken := self._flow.take()) is None:
            if self._failed is not None:
                raise self._failed
            await self._news.wait()
        self._news.notify_all()
        return taken

    async def pause(self) -> None:
        self._flow.paused = True

    async def serve(self, version: int) -> None:
        async with self._news:
            self._flow.serve(version)
            self._news.notify_all()

    async def close(self) -> None:
        """No group is started any more; `run` ends with those in flight."""
        async with self._news:
            self._closed = True
            self._news.notify_all()

    async def _group(self, position: int, unit: PlacedUnit) -> None:
        """Sample the group at `position`; when it is thrown away its position is to be started again."""
        prompt = await asyncio.to_thread(self._prompts.at, position)
        try:
            scored = await self._sampler.group(unit, prompt)
        except Requeued:
            scored = None
        async with self._news:
            del self._on[position]
            if scored is None:
                self._flow.lose(position)
            else:
                self._flow.finish(position, scored, oldest=scored.oldest_version, flat=is_flat(scored))
            self._news.notify_all()

    async def _next(self) -> tuple[int, PlacedUnit] | None:
        """The next position to sample, and where; None once there is none."""
        async with self._news:
            while not self._closed:
                unit = self._free_unit()
                position = None if unit is None else self._flow.start()
                if unit is not None and position is not None:
                    self._on[position] = unit
                    return position, unit
                await self._news.wait()
        return None

    def _free_unit(self) -> PlacedUnit | None:
        """The unit with the fewest groups, where it takes one more."""
        pool = self._sampler.pool
        groups = Counter(pool.present(unit).id for unit in self._on.values())
        unit = min(pool.units, key=lambda unit: groups[unit.id])
        return unit if groups[unit.id] < pool.room(self._sampler.samples) else None


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

    async def close(self) -> None:
        """Nothing is sampled."""


def is_flat(scored: ScoredGroup) -> bool:
    """Whether every completion of the group got the same scores, so that no advantage can differ from 0."""
    rewards = [completion.reward for completion in scored.group.completions]
    columns = [*scored.scores.values(), [0.0 if math.isnan(reward) else reward for reward in rewards]]
    return all(len(set(column)) == 1 for column in columns)
