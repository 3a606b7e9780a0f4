"""Rewards are found by name, module path or file, and return finite numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.gym_score import reasoning_gym_score
from nereus_common.rl.rewards import RewardInput, checked, exact_answer, load_reward
from nereus_common.rl.schedule import Schedule, learning_rate
from nereus_common.rl.statistics import wilson

pytestmark = pytest.mark.fast


def sample(response: str, answer: str = "3") -> RewardInput:
    return RewardInput(0, 0, "how many?", response, answer, {"source_dataset": "letter_counting"})


@pytest.mark.parametrize(
    ("response", "score"),
    [("3", 1), (" 3.\n", 1), ("3", 1), ("3 letters", 0), ("33", 0), ("", 0), (".", 0), ("3..", 0)],
)
def test_an_exact_answer_is_the_whole_response(response: str, score: float) -> None:
    assert exact_answer(sample(response)) == score


def test_a_task_may_give_partial_credit() -> None:
    assert reasoning_gym_score(sample("3")) == 1.0
    assert 0 < reasoning_gym_score(sample("it is 3")) < 1


def test_a_reward_is_found_by_module_path_and_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def half(sample):\n    return 0.5\n")
    assert load_reward("nereus_common.rl.rewards:exact_answer") is exact_answer
    assert load_reward(f"{file}:half")(sample("")) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_anser", "there is no reward named 'exact_anser'"),
        ("no.such.module:f", "No module named"),
        ("nereus_common.rl.rewards:nothing", "no attribute 'nothing'"),
        ("nereus_common.rl.environments:LONGEST_TEXT", "is a int, which cannot be called"),
        ("/no/such/file.py:f", "No such file"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_reward(name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_a_reward_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError), match="returned"):
        checked(value)


def test_wilsons_interval_agrees_with_its_published_example() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20
    interval = wilson(81, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    assert round(wilson(0, 20).high, 4) == 0.1611
    assert wilson(0, 0).n == 0


def test_intervals_are_apart_only_when_they_do_not_touch() -> None:
    assert wilson(20, 200).apart_from(wilson(60, 200))
    assert not wilson(50, 200).apart_from(wilson(60, 200))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("linear", [0.5, 1.0, 1.0, 0.5]), ("cosine", [0.5, 1.0, 1.0, 0.5])],
)
def test_the_rate_climbs_then_follows_its_schedule(schedule: Schedule, rates: list[float]) -> None:
    found = [learning_rate(step, peak=1.0, schedule=schedule, warmup=2, steps=4) for step in range(4)]
    assert found == pytest.approx(rates)
