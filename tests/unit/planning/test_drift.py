"""What sets a replan off, and how long its answer is expected to be of use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId
from nereus_common.planning.drift import Drift, Observed, observe, replanned

pytestmark = pytest.mark.fast

POOL = tuple(DeviceId("node0", f"cpu{number}") for number in range(4))
LIMITS = {"length": 0.3, "efficiency.": 0.2}


def seen(step: int, pool: int = 2, misfits: int = 0, **values: float) -> Observed:
    return Observed(step, frozenset(POOL[:pool]), values, frozenset(POOL[:misfits]))


def after(drift: Drift, *observed: Observed, replan: bool = True) -> Drift:
    """The plan in force uses the first two devices; every replan follows its crossing at once."""
    for now in observed:
        drift = observe(drift, now, POOL[:2], LIMITS)
        if drift.due and replan and now is not observed[-1]:
            drift = replanned(drift, now)
    return drift


def test_a_signal_crosses_when_it_is_further_from_its_reference_than_its_threshold() -> None:
    start = Drift(seen(0, length=100.0))
    assert not observe(start, seen(1, length=130.0), POOL[:2], LIMITS).due
    (up,) = observe(start, seen(1, length=131.0), POOL[:2], LIMITS).due.values()
    (down,) = observe(start, seen(1, length=69.0), POOL[:2], LIMITS).due.values()
    assert (up.change, down.change) == (pytest.approx(0.31), pytest.approx(-0.31))
    assert not up.urgent


def test_a_deviation_that_stays_sets_nothing_off_again_whatever_the_replan_decided() -> None:
    drift = after(Drift(seen(0, length=100.0)), seen(1, length=200.0), *(seen(n, length=200.0) for n in range(2, 6)))
    assert not drift.due
    assert drift.reference.values == {"length": 200.0}


def test_steady_growth_crosses_again_and_again_and_its_intervals_are_the_horizon() -> None:
    """Growth by a hundredth a step: 27 steps to 1.3 times as much."""
    drift, crossed = Drift(seen(0, length=1.0)), []
    for step in range(1, 200):
        now = seen(step, length=1.01**step)
        drift = observe(drift, now, POOL[:2], LIMITS)
        if drift.due:
            crossed.append((step, drift.horizon))
            drift = replanned(drift, now)
    assert crossed == [(27, 1.0), *((27 * n, 27.0) for n in range(2, 8))]


def test_a_horizon_is_a_moving_average_and_of_several_signals_the_smallest_counts() -> None:
    drift = Drift(seen(0, length=1.0, **{"efficiency.gemm": 1.0}))
    steps = [seen(10, length=2.0), seen(20, length=4.0), seen(40, length=8.0)]
    drift = after(drift, *steps)
    assert drift.horizon == 15.0
    both = after(drift, seen(41, length=8.0, **{"efficiency.gemm": 0.5}), replan=False)
    assert both.due.keys() == {"length", "efficiency.gemm"} and both.horizon == 1.0


def test_a_crossing_is_counted_once_while_its_replan_has_to_wait() -> None:
    waiting = after(Drift(seen(0, length=1.0)), *(seen(n, length=2.0) for n in (3, 4, 5)), replan=False)
    assert waiting.last == {"length": 3} and waiting.intervals == {}


@pytest.mark.parametrize(("pool", "urgent"), [(1, True), (3, False)])
def test_a_change_of_the_pool_is_urgent_where_the_plan_uses_what_is_gone(pool: int, urgent: bool) -> None:
    drift = observe(Drift(seen(0)), seen(1, pool), POOL[:2], LIMITS)
    assert drift.due.keys() == {"pool"} and drift.urgent is urgent


def test_a_plan_that_will_not_fit_is_urgent_once_for_each_device() -> None:
    drift = after(Drift(seen(0)), seen(1, misfits=1), seen(2, misfits=1))
    assert not drift.due
    assert after(drift, seen(3, misfits=2)).urgent


def test_a_signal_measured_for_the_first_time_is_its_own_reference() -> None:
    drift = after(Drift(seen(0)), seen(1, length=50.0), seen(2), seen(3, length=70.0))
    (crossing,) = drift.due.values()
    assert crossing.reference == 50.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_measurement_is_refused_by_name(value: float) -> None:
    with pytest.raises(InvalidInput, match="signal length"):
        seen(1, length=value)


def test_a_signal_without_a_threshold_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput) as refused:
        observe(Drift(seen(0)), seen(1, queueing=1.0), POOL, LIMITS)
    assert refused.value.details["field"] == "thresholds.queueing"


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=30))
def test_between_two_replans_no_signal_was_further_off_than_its_threshold(lengths: list[float]) -> None:
    drift = Drift(seen(0, length=lengths[0]))
    for step, length in enumerate(lengths[1:], 1):
        now = seen(step, length=length)
        drift = observe(drift, now, POOL[:2], LIMITS)
        far = abs(length - drift.reference.values["length"]) > 0.3 * drift.reference.values["length"]
        assert bool(drift.due) is far
        if drift.due:
            drift = replanned(drift, now)
    assert all(1 <= interval < len(lengths) for interval in drift.intervals.values())
