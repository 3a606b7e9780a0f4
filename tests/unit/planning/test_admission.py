"""Which transitions are taken."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.planning.admission import Decision, Target, Verdict, admit

pytestmark = pytest.mark.fast

ACTOR = ModelStage.parse("actor/training")


def plan(number: int) -> Plan:
    return Plan(((ACTOR, StagePlan(Layout(), (DeviceId("node0", f"cpu{number}"),))),))


def target(number: int, step: float, move: float | None) -> Target:
    return Target(plan(number), step, move)


def verdicts(decision: Decision) -> list[str]:
    return [str(one.verdict) for one in decision.weighed]


def test_a_saving_that_repays_within_its_share_of_the_horizon_is_taken() -> None:
    decision = admit(10.0, [target(0, 8.0, 9.0)], horizon=9.0, gamma=0.5)
    (only,) = decision.weighed
    assert (only.saving, only.payback, decision.limit) == (2.0, 4.5, 4.5)
    assert decision.taken == only.target
    assert admit(10.0, [target(0, 8.0, 9.01)], horizon=9.0, gamma=0.5).taken is None


def test_a_target_nearly_as_good_is_taken_where_the_best_is_too_dear() -> None:
    targets = [target(2, 8.6, 0.1), target(0, 8.0, 30.0), target(1, 8.2, 3.0), target(3, 8.3, 1.0)]
    decision = admit(10.0, targets, horizon=8.0)
    assert decision.taken == targets[2]
    assert verdicts(decision) == ["too dear", "taken", "not needed", "not needed"]
    assert verdicts(admit(10.0, targets[:2], horizon=8.0)) == ["too dear", "too slow"]


def test_what_cannot_be_reached_is_passed_over() -> None:
    decision = admit(10.0, [Target(plan(0), 8.0, None, "node0/cpu1 lacks 5 bytes"), target(1, 8.1, 1.0)], horizon=4.0)
    assert verdicts(decision) == ["unreachable", "taken"]
    assert decision.weighed[0].payback == math.inf


def test_what_saves_nothing_is_never_taken_however_cheap() -> None:
    assert verdicts(admit(8.0, [target(0, 8.0, 0.0), target(1, 8.2, 0.0)], horizon=1e9)) == ["saves nothing"] * 2


def test_an_urgent_decision_waives_the_profit_and_not_the_way() -> None:
    targets = [Target(plan(0), 5.0, None), target(1, 50.0, 1e6), target(2, 60.0, 0.0)]
    decision = admit(None, targets, horizon=1.0, gamma=0.0, urgent=True)
    assert decision.taken == targets[1]
    assert admit(None, targets[:1], horizon=1.0, urgent=True).taken is None


def test_a_confidence_of_zero_admits_nothing_that_is_not_urgent() -> None:
    assert admit(10.0, [target(0, 1.0, 0.0)], horizon=1e9, gamma=0.0).taken is None


seconds = st.floats(0, 1e4)


@given(seconds, st.lists(st.tuples(seconds, st.none() | seconds), max_size=6), st.floats(0, 1e3), st.floats(0, 1))
def test_whatever_is_taken_saves_and_repays_in_time(
    now: float, offers: list[tuple[float, float | None]], horizon: float, gamma: float
) -> None:
    decision = admit(now, [target(n, *offer) for n, offer in enumerate(offers)], horizon=horizon, gamma=gamma)
    assert len(decision.weighed) == len(offers)
    taken = [one for one in decision.weighed if one.verdict is Verdict.TAKEN]
    assert [one.target for one in taken] == ([] if decision.taken is None else [decision.taken])
    for one in taken:
        assert one.saving > 0 and one.target.transition_seconds is not None
        assert one.target.transition_seconds <= one.saving * gamma * horizon * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"step_seconds": math.nan}, "step_seconds"),
        ({"step_seconds": None}, "step_seconds"),
        ({"horizon": -1.0}, "horizon"),
        ({"horizon": math.inf}, "horizon"),
        ({"gamma": 1.5}, "gamma"),
        ({"near": math.nan}, "near"),
    ],
)
def test_nothing_is_decided_on_numbers_that_are_none(change: dict[str, float], field: str) -> None:
    given = {"step_seconds": 10.0, "horizon": 1.0} | change
    with pytest.raises(InvalidInput) as refused:
        admit(given.pop("step_seconds"), [], **given)
    assert refused.value.details["field"] == field


@pytest.mark.parametrize(
    ("step", "move", "field"), [(math.nan, 1.0, "step_seconds"), (1.0, -1.0, "transition_seconds")]
)
def test_a_target_without_a_true_prediction_is_refused(step: float, move: float, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        target(0, step, move)
    assert refused.value.details["field"] == field
