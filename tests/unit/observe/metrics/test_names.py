"""Events become named numbers."""

from __future__ import annotations

import pytest

from nereus_common.observe.metrics.names import flatten, is_before, values_of

pytestmark = pytest.mark.fast


def test_nested_numbers_get_dotted_names_and_everything_else_is_left_out() -> None:
    payload = {"loss": 1, "rewards": {"exact_answer": 0.5}, "when": "after", "log": ["a"], "plan": None, "done": True}
    assert flatten(payload) == {"loss": 1.0, "rewards.exact_answer": 0.5, "done": 1.0}


def test_a_step_gets_its_throughput_over_its_whole_duration() -> None:
    values = values_of("step", {"step": 3, "tokens": 60, "seconds": {"generation": 1.0, "total": 4.0}})
    assert values == {"tokens": 60, "seconds.generation": 1.0, "seconds.total": 4.0, "tokens_per_second": 15.0}


def test_an_evaluation_is_named_by_its_mode() -> None:
    payload = {"when": "step", "step": 4, "mode": "greedy", "mean": 0.5, "low": 0.4, "high": 0.6, "n": 80}
    assert values_of("evaluation", payload) == {
        "evaluation.greedy.mean": 0.5,
        "evaluation.greedy.low": 0.4,
        "evaluation.greedy.high": 0.6,
        "evaluation.greedy.n": 80.0,
    }


TRANSITION = {
    "transition_id": "t1",
    "state": "done",
    "epoch": 2,
    "step": 4,
    "bytes_moved": 10,
    "bytes_needed": 8,
    "seconds": {"move": 1.5, "verify": 0.5},
}


@pytest.mark.parametrize(("state", "done"), [("done", 1.0), ("undone", 0.0), ("lost", 0.0)])
def test_a_transition_that_ran_is_measured_at_its_end(state: str, done: float) -> None:
    assert values_of("transition", {**TRANSITION, "state": state}) == {
        "transition.done": done,
        "transition.epoch": 2.0,
        "transition.bytes_moved": 10.0,
        "transition.bytes_needed": 8.0,
        "transition.seconds.move": 1.5,
        "transition.seconds.verify": 0.5,
    }


@pytest.mark.parametrize("change", [{"state": "prepared"}, {"state": "committed"}, {"state": "undone", "step": -1}])
def test_a_transition_under_way_and_one_that_never_ran_measure_nothing(change: dict[str, object]) -> None:
    assert values_of("transition", {**TRANSITION, **change}) == {}


@pytest.mark.parametrize("kind", ["state", "log", "sync", "a kind of the future"])
def test_other_events_hold_no_metrics(kind: str) -> None:
    assert values_of(kind, {"state": "running", "seconds": 1.0}) == {}


@pytest.mark.parametrize(
    ("step", "name", "before"),
    [
        (3, "loss", True),
        (4, "loss", False),
        (4, "evaluation.greedy.mean", True),
        (4, "checkpoint.step", True),
        (4, "transition.done", True),
        (5, "evaluation.greedy.mean", False),
        (5, "checkpoint.step", False),
    ],
)
def test_a_job_that_goes_on_at_a_step_keeps_what_was_measured_of_the_state_it_starts_from(
    step: int, name: str, before: bool
) -> None:
    assert is_before(step, [name], first_step=4) is before
