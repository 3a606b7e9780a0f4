"""Whole episodes: a model's responses against environments in real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nereus_common.core.errors import JobFailed
from nereus_common.engines.environments import EnvironmentChoice, EnvironmentPool, play
from nereus_common.rl.assembly import Completion
from nereus_common.rl.environments import Task
from nereus_common.rl.episodes import EpisodeLimits
from nereus_common.rl.prompts import Sizes
from nereus_common.rl.sources import TaskSource

BAD = Path(__file__).with_name("bad_environments.py")
LIMITS = EpisodeLimits(max_turns=3, turn_tokens=64, max_tokens=300)
PROMPT = (1, 2, 3)
END = 0

Make = Callable[..., EnvironmentPool]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[EnvironmentPool] = []

    def make(name: str, **options: Any) -> EnvironmentPool:
        made.append(EnvironmentPool("job1", EnvironmentChoice(name, options, 30.0), tmp_path))
        return made[-1]

    yield make
    for one in made:
        await one.close()


class Script:
    """A model that says what it is told to; ids are characters, and END closes each response."""

    def __init__(self, *lines: str, finished: bool = True) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self._lines = iter(lines)
        self._finished = finished

    async def generate(self, prompt: tuple[int, ...], max_tokens: int) -> Completion:
        await asyncio.sleep(0)
        self.prompts.append(prompt)
        ids = (*map(ord, next(self._lines)), END)[:max_tokens]
        return Completion(ids, (-1.0,) * len(ids), (len(self.prompts),) * len(ids), self._finished and ids[-1] == END)


def text(ids: tuple[int, ...]) -> str:
    return "".join(chr(token) for token in ids if token > END)


async def played(pool: EnvironmentPool, script: Script, task: Task, limits: EpisodeLimits = LIMITS) -> Completion:
    def observed(said: str) -> list[int]:
        return [*map(ord, f"[{said}]")]

    return await play(pool, task, PROMPT, script.generate, limits, observed, lambda ids: text(tuple(ids)))


async def test_reasoning_gym_tasks_are_played_until_right(pool: Make) -> None:
    questions = TaskSource("letter_counting", {"min_words": 1, "max_words": 2}, Sizes(8, 0, 0)).open(0).train
    tasks = [
        Task(position, 0, question.text, question.answer, question.metadata)
        for position, question in enumerate(questions)
    ]
    scripts = [Script("many", "99", task.answer) for task in tasks]
    gym = pool("reasoning_gym", discount=0.5, retry="no")
    done = await asyncio.gather(*(played(gym, script, task) for script, task in zip(scripts, tasks, strict=True)))
    for completion, script, task in zip(done, scripts, tasks, strict=True):
        assert text(completion.token_ids) == f"many[no]99[no]{task.answer}"
        assert (completion.reward, completion.finished) == (0.25, True)
        sampled = [token for token, own in zip(completion.token_ids, completion.sampled, strict=True) if own]
        assert text(tuple(sampled)) == f"many99{task.answer}"
        assert completion.versions[:2] == (1, 1) and completion.versions[-1] == 3
        whole = PROMPT + completion.token_ids
        assert all(whole[: len(prompt)] == prompt for prompt in script.prompts)


async def test_an_episode_that_is_never_right_ends_with_its_turns(pool: Make) -> None:
    script = Script("a", "b", "c", "d")
    question = TaskSource("letter_counting", sizes=Sizes(1, 0, 0)).open(0).train[0]
    done = await played(
        pool("reasoning_gym", retry="no"), script, Task(0, 0, question.text, question.answer, question.metadata)
    )
    assert (text(done.token_ids), done.reward, done.finished) == ("a[no]b[no]c", 0.0, True)


async def test_an_episode_of_one_turn_is_a_plain_response(pool: Make) -> None:
    done = await played(pool(f"{BAD}:parrot"), Script("bye"), Task(0, 0, "q", "bye"))
    assert (text(done.token_ids), done.reward, all(done.sampled)) == ("bye", 1.0, True)


@pytest.mark.parametrize(
    ("limits", "said", "expected"),
    [
        (EpisodeLimits(3, 4, 300), "hello", ("hell", 0.0)),
        (EpisodeLimits(3, 64, 8), "hello", ("hello", 1.0)),
        (EpisodeLimits(3, 64, 19), "hello", ("hello[again 1 hello]", 1.0)),
    ],
    ids=["a response is cut", "an observation does not fit", "no token is left"],
)
async def test_what_is_cut_is_not_finished_and_keeps_the_rewards_so_far(
    pool: Make, limits: EpisodeLimits, said: str, expected: tuple[str, float]
) -> None:
    done = await played(pool(f"{BAD}:parrot"), Script(said, said), Task(0, 0, "q", "bye"), limits)
    assert done.finished is False
    assert expected[0].startswith(text(done.token_ids)) and done.reward == expected[1]


async def test_a_fault_of_the_environment_is_named_with_its_turn_and_frees_its_place(
    pool: Make, tmp_path: Path
) -> None:
    bad = EnvironmentPool("job2", EnvironmentChoice(f"{BAD}:Bad", {"until": 9}), tmp_path, open_episodes=1)
    try:
        with pytest.raises(JobFailed, match="position 7, sample 2, turn 2"):
            await played(bad, Script("fine", "raise"), Task(7, 2, "q"))
        done = await played(bad, Script("x", "y", "z"), Task(8, 0, "q"))
        assert done.reward == 1.5
    finally:
        await bad.close()
