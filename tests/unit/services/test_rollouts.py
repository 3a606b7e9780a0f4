"""Rollouts while units are replaced: each position is consumed once, in order, and never staler than the job allows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from nereus_controller.generation import GenerationPool, Requeued
from nereus_controller.placed import PlacedStage, PlacedUnit
from nereus_controller.rollouts import LiveRollouts
from nereus_controller.sampler import GroupSampler

from nereus_common.core.errors import ProcessLost, Unavailable
from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, StagePlan
from nereus_common.core.workflow import ACTOR_GENERATION
from nereus_common.rl.assembly import Completion, Group
from nereus_common.rl.flow import Pace, RolloutFlow
from nereus_common.rl.prompts import Prompt, Question
from nereus_common.rl.step_rollouts import ScoredGroup

pytestmark = pytest.mark.fast
LIMITS = GenerationLimits(max_sequences=2, max_batched_tokens=64, max_length=64, kv_bytes=1 << 20)
ROOM = 3
"""Groups of one sample that a unit of two sequence slots takes."""
SOON = 2.0
"""Seconds; less than any deadline here."""


def stage(epoch: int, units: int) -> PlacedStage:
    devices = tuple(DeviceId("node0", f"cpu{slot}") for slot in range(units))
    found = tuple(PlacedUnit(f"e{epoch}.r{replica}", replica, epoch, "", cast("Any", None)) for replica in range(units))
    return PlacedStage(ACTOR_GENERATION, StagePlan(Layout(), devices, units, generation=LIMITS), found)


@dataclass
class Units:
    """Stands for the units behind the pool: groups grow until they are let go, thrown away, or fail."""

    pool: GenerationPool
    samples: int = 1
    version: int = 0
    growing: dict[int, tuple[PlacedUnit, int, asyncio.Future[bool]]] = field(default_factory=dict)
    """Position → unit, version that is served when it begins, and whether it comes to its end."""
    begun: Counter[int] = field(default_factory=Counter)

    def at(self, position: int) -> Prompt:
        return Prompt(position, (1,), Question("q", "a"))

    async def group(self, unit: PlacedUnit, prompt: Prompt) -> ScoredGroup:
        ends: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        version = self.version
        self.begun[prompt.position] += 1
        self.growing[prompt.position] = unit, version, ends
        try:
            if not await ends:
                raise Requeued
        finally:
            del self.growing[prompt.position]
        completion = Completion((1, 2), (0.0, 0.0), (version, self.version), True)
        return ScoredGroup(Group(prompt.position, (1,), (completion,)), {})

    def end(self, position: int, well: bool) -> None:
        self.growing[position][2].set_result(well)


@asynccontextmanager
async def running(pace: Pace, units: int = 2) -> AsyncIterator[tuple[LiveRollouts, Units]]:
    scripted = Units(GenerationPool(stage(1, units), 5.0))
    flow: RolloutFlow[ScoredGroup] = RolloutFlow(pace)
    rollouts = LiveRollouts(flow, cast("GroupSampler", scripted), cast("Any", scripted), 5.0)
    task = asyncio.create_task(rollouts.run())
    try:
        yield rollouts, scripted
    finally:
        await rollouts.close()
        task.cancel()
        await asyncio.wait([task])


async def settled() -> None:
    """Let everything that can happen happen; prompts are made on threads."""
    for _ in range(10):
        await asyncio.sleep(0.002)


async def test_no_unit_has_more_groups_than_it_has_room_for_and_new_units_take_theirs() -> None:
    async with running(Pace(groups=20, steps=1)) as (rollouts, units):
        await settled()
        assert Counter(unit.id for unit, _, _ in units.growing.values()) == {"e1.r0": ROOM, "e1.r1": ROOM}
        await rollouts.pause()
        units.pool.replace(stage(2, 3))
        await rollouts.serve(0)
        await settled()
        at = Counter(units.pool.present(unit).id for unit, _, _ in units.growing.values())
        assert at == {"e2.r0": ROOM, "e2.r1": ROOM, "e2.r2": ROOM}, "what was begun before counts where it goes on"


async def test_a_group_that_was_thrown_away_waits_for_the_new_weights_and_is_drawn_for_its_own_prompt() -> None:
    async with running(Pace(groups=2, steps=3, staleness=1)) as (rollouts, units):
        await settled()
        assert sorted(units.growing) == [0, 1, 2, 3]
        for position in (0, 1):
            units.end(position, True)
        assert (await rollouts.take(0)).next_position == 2
        await rollouts.pause()
        units.end(2, False)
        await settled()
        assert sorted(units.growing) == [3], "nothing is begun while the plan changes"
        units.version = 1
        await rollouts.serve(1)
        await settled()
        assert {position: version for position, (_, version, _) in units.growing.items()} == {2: 1, 3: 0, 4: 1, 5: 1}
        for position in (2, 3):
            units.end(position, True)
        taken = await rollouts.take(1)
        assert taken.batch.position.tolist() == [2, 3] and units.begun[2] == 2


async def test_a_failure_of_any_group_is_raised_as_itself_and_ends_the_others() -> None:
    units = Units(GenerationPool(stage(1, 2), 5.0))
    flow: RolloutFlow[ScoredGroup] = RolloutFlow(Pace(groups=4, steps=1))
    task = asyncio.create_task(LiveRollouts(flow, cast("GroupSampler", units), cast("Any", units), 5.0).run())
    await settled()
    units.growing[2][2].set_exception(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await task
    assert not units.growing


@pytest.mark.parametrize("seed", range(5))
async def test_under_random_moves_every_position_is_consumed_once_in_order_and_within_its_staleness(seed: int) -> None:
    """Units come and go at every other boundary; a part of what is in flight is thrown away, the rest goes on."""
    dice = random.Random(seed)
    pace = Pace(dice.randint(1, 3), 8, dice.randint(1, 3))
    async with running(pace) as (rollouts, units):
        consumed: list[int] = []
        for step in range(pace.steps):
            taking = asyncio.create_task(rollouts.take(step))
            while not taking.done():
                await asyncio.sleep(0.002)
                for position in [one for one in units.growing if dice.random() < 0.5]:
                    units.end(position, True)
                await asyncio.sleep(0)
            batch = (await taking).batch
            consumed += dict.fromkeys(batch.position.tolist())
            assert 0 <= step - int(batch.versions.min()) <= pace.staleness
            await rollouts.pause()
            if dice.random() < 0.5:
                for position in [one for one in units.growing if dice.random() < 0.5]:
                    units.end(position, False)
                units.pool.replace(stage(step + 2, dice.randint(1, 3)))
            await asyncio.sleep(0.002)
            units.version = step + 1
            await rollouts.serve(step + 1)
        assert consumed == list(range(pace.groups * pace.steps))


async def test_a_step_does_not_wait_for_groups_once_their_sampling_has_failed() -> None:
    """Nor one that begins to wait after it has: whoever should have been cancelled by then may not have been."""
    lost = ProcessLost("the unit's process was killed")
    async with running(Pace(groups=2, steps=1)) as (rollouts, units):
        await settled()
        waiting = asyncio.create_task(rollouts.take(0))
        units.growing[0][2].set_exception(lost)
        async with asyncio.timeout(SOON):
            for taking in (waiting, rollouts.take(0)):
                with pytest.raises(ProcessLost, match="was killed"):
                    await taking
