"""Environments run in processes of their own; what goes wrong there is named, and loses nothing else."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, JobFailed
from nereus_common.engines.environments import Dialogue, EnvironmentChoice, EnvironmentPool
from nereus_common.rl.environments import Task

BAD = Path(__file__).with_name("bad_environments.py")
START = 60.0
MEMORY = 256 << 20
Make = Callable[..., EnvironmentPool]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[EnvironmentPool] = []

    def make(
        name: str, *, timeout: float = 30.0, options: dict[str, Any] | None = None, **more: int
    ) -> EnvironmentPool:
        choice = EnvironmentChoice(f"{BAD}:{name}", options or {}, timeout, MEMORY)
        made.append(EnvironmentPool("job1", choice, tmp_path, **more))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def task(sample: int = 0) -> Task:
    return Task(40 + sample, sample, "q", "bye")


async def open_many(stack: AsyncExitStack, pool: EnvironmentPool, count: int) -> list[Dialogue]:
    return [await stack.enter_async_context(pool.episode(task(sample), timeout=START)) for sample in range(count)]


async def test_many_episodes_are_played_side_by_side_in_few_processes(pool: Make) -> None:
    fair = pool("Fair", options={"until": 3})
    async with AsyncExitStack() as stack:
        dialogues = await open_many(stack, fair, 6)
        seen = [await asyncio.gather(*(one.step(word) for one in dialogues)) for word in "abc"]
    texts = [[observation.text.split(":") for observation in turn] for turn in seen]
    assert [text[:3] for text in texts[1]] == [[str(sample), "2", "b"] for sample in range(6)]
    pids = {text[3] for turn in texts for text in turn}
    assert len(pids) == 2 and str(os.getpid()) not in pids
    assert [observation.done for observation in seen[1] + seen[2]] == [False] * 6 + [True] * 6


async def test_a_plain_function_is_an_environment(pool: Make) -> None:
    async with pool("parrot", options={"word": "once more"}).episode(task(), timeout=START) as dialogue:
        assert (await dialogue.step("hi")).text == "once more 1 hi"
        last = await dialogue.step("bye")
    assert (last.text, last.done) == ("once more 3 hi once more 1 hi bye", True)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("dict", "returned dict, which is no Observation"),
        ("nan", "returned nan, which is not finite"),
        ("bytes", "an Observation of text bytes"),
        ("done", "and done 1"),
        ("long", "returned 2097152 characters"),
        ("half", "surrogates not allowed"),
    ],
)
async def test_nonsense_is_refused_and_named(pool: Make, response: str, said: str) -> None:
    async with pool("nonsense", processes=1).episode(task(2), timeout=START) as dialogue:
        with pytest.raises(JobFailed, match=said):
            await dialogue.step(response)


async def test_an_environment_that_raises_ends_its_own_episode_alone(pool: Make) -> None:
    async with AsyncExitStack() as stack:
        first, second = await open_many(stack, pool("Bad", processes=1), 2)
        await first.step("fine")
        with pytest.raises(JobFailed, match="ZeroDivisionError") as failed:
            await first.step("raise")
        assert "position 40, sample 0, turn 2" in str(failed.value) and "Bad" in str(failed.value)
        assert failed.value.details["turn"] == "2" and "Traceback" in failed.value.details["log"]
        assert (await second.step("fine")).text.startswith("1:1:fine")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("hang", "did not finish within 2 s"),
        ("exit", "exited with status 3"),
        ("sys.exit", "exited with status 4"),
        ("bytes", "needs more than the 256 MiB"),
        ("array", "needs more than the 256 MiB"),
        ("leak", "needs more than the 256 MiB"),
    ],
)
async def test_what_takes_the_process_down_is_named_by_all_its_episodes_and_the_pool_lives_on(
    pool: Make, response: str, said: str
) -> None:
    bad = pool("Bad", processes=1, timeout=2.0 if response == "hang" else 30.0)
    await bad.start(timeout=START)
    begun = time.monotonic()
    async with AsyncExitStack() as stack:
        guilty, innocent = await open_many(stack, bad, 2)
        with pytest.raises(JobFailed, match=said) as failed:
            await guilty.step(response)
        assert failed.value.details["position"] == "40" and failed.value.details["turn"] == "1"
        with pytest.raises(JobFailed, match=f"position 41, sample 1, turn 1: .*{said}.* position 40"):
            await innocent.step("fine")
        third = await stack.enter_async_context(bad.episode(task(2), timeout=START))
        assert (await third.step("fine")).text.startswith("2:1:fine")
    assert time.monotonic() - begun < 30


async def test_a_call_that_waits_behind_a_slow_one_has_its_whole_time_limit(pool: Make) -> None:
    async with AsyncExitStack() as stack:
        slow = await open_many(stack, pool("Slow", processes=1, timeout=2.0), 4)
        seen = await asyncio.gather(*(one.step("") for one in slow))
    assert len(seen) == 4


async def test_a_call_whose_caller_went_away_does_not_count_against_the_next(pool: Make) -> None:
    async with AsyncExitStack() as stack:
        first, second = await open_many(stack, pool("Slow", processes=1, timeout=2.0, options={"seconds": 1.5}), 2)
        abandoned = asyncio.create_task(first.step(""))
        await asyncio.sleep(0.2)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        assert (await second.step("")).done


async def test_a_call_that_hangs_is_blamed_though_its_caller_went_away(pool: Make) -> None:
    async with AsyncExitStack() as stack:
        first, second = await open_many(stack, pool("Bad", processes=1, timeout=1.0), 2)
        abandoned = asyncio.create_task(first.step("hang"))
        await asyncio.sleep(0.2)
        abandoned.cancel()
        with pytest.raises(JobFailed, match="did not finish within 1 s, on the prompt at position 40"):
            await second.step("fine")


async def test_a_process_that_ends_between_two_calls_costs_only_the_episodes_in_it(pool: Make) -> None:
    bad = pool("Bad", processes=1)
    async with AsyncExitStack() as stack:
        (first,) = await open_many(stack, bad, 1)
        await first.step("later")
        await asyncio.sleep(1)
        async with bad.episode(task(1), timeout=START) as second:
            assert (await second.step("fine")).text.startswith("1:1:fine")
        with pytest.raises(JobFailed, match="lost its process, on the prompt at position 40, sample 0, turn 2"):
            await first.step("fine")


async def test_no_more_episodes_are_open_than_allowed(pool: Make) -> None:
    fair = pool("Fair", processes=1, open_episodes=1)
    async with fair.episode(task(), timeout=START) as dialogue:
        await dialogue.step("a")
        with pytest.raises(DeadlineExceeded, match="none of 1 open episodes ended within"):
            async with fair.episode(task(1), timeout=0.2):
                pass
    async with fair.episode(task(1), timeout=START) as dialogue:
        assert (await dialogue.step("b")).text.startswith("1:1:b")


async def test_closing_ends_what_is_open(pool: Make) -> None:
    bad = pool("Bad")
    async with AsyncExitStack() as stack:
        hanging, idle = await open_many(stack, bad, 2)
        under_way = asyncio.create_task(hanging.step("hang"))
        await asyncio.sleep(0.2)
        await bad.close()
        with pytest.raises(JobFailed, match="SIGKILL"):
            await under_way
        with pytest.raises(JobFailed, match="it was closed"):
            await idle.step("fine")
        with pytest.raises(JobFailed, match="lost its process"):
            await stack.enter_async_context(bad.episode(task(), timeout=START))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Missing", {}, "no attribute 'Missing'"),
        ("StepOnly", {}, "has no method reset"),
        ("Fair", {"untli": 3}, "unexpected keyword argument 'untli'"),
        ("parrot", {"wrod": "x"}, "unexpected keyword argument 'wrod'"),
        ("BadConstructor", {}, "no licence"),
    ],
)
async def test_an_environment_that_cannot_be_made_is_refused_before_any_episode(
    pool: Make, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        await pool(name, options=options).start(timeout=START)


async def test_an_episode_that_cannot_begin_is_named(pool: Make) -> None:
    with pytest.raises(JobFailed, match=r"LookupError: no such task, on the prompt at position 43, sample 3, turn 0"):
        async with pool("BadReset", processes=1).episode(task(3), timeout=START):
            pass
