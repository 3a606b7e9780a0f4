"""Rewards run in processes of their own; what goes wrong there is named, and loses nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, JobFailed
from nereus_common.engines.rewards.pool import RewardPool, TimedReward
from nereus_common.rl.rewards import RewardInput

BAD = Path(__file__).with_name("bad_rewards.py")
Pool = Callable[..., RewardPool]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    made: list[RewardPool] = []

    def make(*rewards: TimedReward, processes: int = 2) -> RewardPool:
        made.append(RewardPool("job1", rewards, tmp_path, processes=processes, memory_bytes=256 << 20))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def reward(function: str, timeout: float = 30.0) -> TimedReward:
    return TimedReward(f"{BAD}:{function}", timeout)


def samples(*responses: str) -> list[RewardInput]:
    return [RewardInput(40 + index, index % 8, "q", response, "a") for index, response in enumerate(responses)]


async def test_every_sample_gets_the_scores_of_all_rewards_in_order(pool: Pool) -> None:
    exact = TimedReward("nereus_common.rl.rewards:exact_answer")
    scores = await pool(reward("length"), exact).score(samples("a", "bb", "a.", "dddd"), timeout=60)
    assert scores == [(1.0, 1.0), (2.0, 0.0), (2.0, 1.0), (4.0, 0.0)]


async def test_rewards_run_in_other_processes(pool: Pool) -> None:
    pids = await pool(reward("process")).score(samples("x", "y"), timeout=60)
    assert os.getpid() not in {int(pid) for (pid,) in pids}


@pytest.mark.parametrize(
    ("function", "response", "said"),
    [
        ("raising", "", "ZeroDivisionError"),
        ("vanishing", "die", "exited with status 3"),
        ("nonsense", "x", "returned 'good', which is not a number"),
        ("slow", "hang", "did not finish within 1 s"),
        ("greedy", "eat", "needs more than the 256 MiB"),
    ],
)
async def test_a_reward_that_goes_wrong_is_named_with_its_sample_and_the_pool_lives_on(
    pool: Pool, function: str, response: str, said: str
) -> None:
    scorer = pool(reward(function, timeout=1.0 if function == "slow" else 30.0))
    await scorer.start(timeout=60)
    begun = time.monotonic()
    with pytest.raises(JobFailed) as failed:
        await scorer.score(samples("fine", "fine", response), timeout=60)
    assert time.monotonic() - begun < 30
    assert function in str(failed.value) and said in str(failed.value)
    if function != "nonsense":
        assert failed.value.details["position"] == "42"
        assert len(await scorer.score(samples("fine"), timeout=60)) == 1


async def test_a_reward_that_does_not_exist_is_refused_before_any_sample(pool: Pool) -> None:
    with pytest.raises(InvalidInput, match="no attribute 'missing'"):
        await pool(reward("missing")).start(timeout=60)


async def test_all_of_it_has_a_deadline(pool: Pool) -> None:
    scorer = pool(reward("slow", timeout=60))
    await scorer.start(timeout=60)
    with pytest.raises(DeadlineExceeded, match="scoring 1 samples took longer than 1 s"):
        await scorer.score(samples("hang"), timeout=1)
