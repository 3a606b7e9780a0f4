"""Environments are found as rewards are, and give plain observations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.environments import Observation, Task, checked_observation, load_environment
from nereus_common.rl.gym_score import ReasoningGym

pytestmark = pytest.mark.fast


def first_task(dataset: str, **params: Any) -> Task:
    item = create_dataset(dataset, seed=1, size=1, **params)[0]
    return Task(0, 0, item["question"], item["answer"], item["metadata"])


def test_an_environment_is_found_by_name_path_and_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def echo(history, task):\n    return history[0].upper()\n")
    assert isinstance(load_environment("reasoning_gym", {})(), ReasoningGym)
    assert isinstance(load_environment("nereus_common.rl.gym_score:ReasoningGym", {"discount": 0.5})(), ReasoningGym)
    environment = load_environment(f"{file}:echo", {})()
    environment.reset(Task(0, 0, "q"))
    assert str(environment.step("a")) == "A"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gim", {}, "there is no environment named 'reasoning_gim' .installed: reasoning_gym"),
        ("nereus_common.rl.environments:Task", {}, "has no method reset"),
        ("reasoning_gym", {"discount": 2.0}, "discount is 2.0"),
        ("reasoning_gym", {"discuont": 0.5}, "'discuont'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_by_name(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_environment(name, options)


def test_episodes_of_one_environment_share_nothing() -> None:
    make = load_environment("tests.unit.rl.test_environments:echo", {})
    one, other = make(), make()
    for episode in (one, other):
        episode.reset(Task(0, 0, "q"))
    one.step("a")
    assert other.step("b").text == "b"


def echo(history: tuple[str, ...], task: Task) -> Observation:
    return Observation(" ".join(history))


def test_an_observation_becomes_a_plain_one() -> None:
    class Loud(str):
        pass

    seen = checked_observation(Observation(Loud("hi"), True, False))
    assert type(seen.text) is str and type(seen.reward) is float


@pytest.mark.parametrize("value", [None, ("hi", 1.0, True), Observation("", float("inf")), Observation("", "1")])  # type: ignore[arg-type]
def test_what_is_no_observation_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="returned"):
        checked_observation(value)


@pytest.mark.parametrize(
    ("dataset", "params"), [("letter_counting", {"max_words": 2, "min_words": 1}), ("gcd", {}), ("countdown", {})]
)
def test_reasoning_gym_lets_the_model_try_again_until_its_own_score_says_right(
    dataset: str, params: dict[str, Any]
) -> None:
    task = first_task(dataset, **params)
    # countdown's items carry an expression as one answer of many
    environment = ReasoningGym(discount=0.5, retry="no")
    environment.reset(task)
    assert [environment.step("wrong"), environment.step("-17")] == [Observation("no"), Observation("no")]
    assert environment.step(f" {task.answer}\n") == Observation("", 0.25, True)
    environment.reset(task)
    assert environment.step(task.answer).reward == 1.0


def test_partial_credit_is_enough_where_it_is_said_to_be() -> None:
    task = first_task("letter_counting", min_words=1, max_words=2)
    environment = ReasoningGym(solved=0.005)
    environment.reset(task)
    seen = environment.step(f"it is {task.answer}")
    assert seen.done and 0 < seen.reward < 1


def test_a_prompt_of_no_task_is_refused() -> None:
    with pytest.raises(InvalidInput, match="of no reasoning-gym task"):
        ReasoningGym().reset(Task(0, 0, "q", "a", {"source_dataset": "sums"}))


def test_the_environments_of_the_guide_work(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    file = tmp_path / "guide.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)))
    guess = load_environment(f"{file}:GuessTheNumber", {})()
    guess.reset(Task(0, 0, "guess", "5"))
    assert [guess.step(number) for number in ("3", "7", "5")] == [
        Observation("higher"),
        Observation("lower"),
        Observation(reward=1.0, done=True),
    ]
    persuade = load_environment(f"{file}:persuade", {"word": "kindly"})()
    persuade.reset(Task(0, 0, "ask"))
    assert [persuade.step("now!").done, persuade.step("kindly").done] == [False, True]
