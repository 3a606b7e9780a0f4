"""Efficiencies learned from measured phases."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.planning.calibration import PRIOR_FACTOR, PRIOR_SPREAD, Calibration, calibrated

pytestmark = pytest.mark.fast

TRUE = {"gemm": 2.0, "attention": 5.0, "all_reduce.node": 1.5}


def phases(
    count: int, true: dict[str, float], noise: float = 0.0, seed: int = 0
) -> list[tuple[dict[str, float], float]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        nominal = {name: draw.uniform(0.1, 3.0) for name in true}
        seconds = sum(nominal[name] * factor for name, factor in true.items())
        found.append((nominal, seconds * (1 + draw.gauss(0, noise))))
    return found


def test_what_was_never_measured_is_conservative_and_uncertain() -> None:
    found = Calibration().predict({"gemm": 2.0})
    assert found.seconds == 2.0 * PRIOR_FACTOR and found.spread >= 2.0 * PRIOR_SPREAD
    assert Calibration().efficiency("gemm") == 1 / PRIOR_FACTOR


def test_factors_are_found_from_sums_alone() -> None:
    found = calibrated(phases(40, TRUE))
    for name, factor in TRUE.items():
        assert found.efficiency(name) == pytest.approx(1 / factor, rel=0.03)


def test_noise_averages_out_and_the_spread_says_how_far() -> None:
    found, errors = calibrated(phases(100, TRUE, noise=0.05)), []
    for nominal, seconds in phases(200, TRUE, seed=1):
        predicted = found.predict(nominal)
        errors.append((predicted.seconds - seconds) / predicted.spread)
    assert np.abs(errors).max() < 2


def test_plans_of_the_same_classes_share_what_was_learned() -> None:
    found = calibrated(phases(40, TRUE))
    assert found.predict({"gemm": 1.0}).seconds == pytest.approx(2.0, rel=0.05)
    alone, mixed = found.predict({"gemm": 1.0}), found.predict({"gemm": 1.0, "attention.unseen": 0.1})
    assert alone.confidence > 0.9 > mixed.confidence


def test_an_efficiency_that_drifts_is_followed() -> None:
    before, after = phases(100, TRUE), phases(150, {**TRUE, "gemm": 4.0}, seed=2)
    assert calibrated([*before, *after]).efficiency("gemm") == pytest.approx(1 / 4.0, rel=0.1)


def test_a_class_that_is_measured_no_more_becomes_as_uncertain_as_a_new_one_and_never_more() -> None:
    found = calibrated([*phases(20, TRUE), *phases(2_000, {"gemm": 2.0})])
    spread = math.sqrt(found.covariance[found.classes.index("attention"), found.classes.index("attention")])
    assert spread <= max(PRIOR_SPREAD, 1 / found.efficiency("attention")) * (1 + 1e-9)
    assert found.predict({"gemm": 1.0}).confidence > 0.9


def test_hardware_that_is_far_from_its_data_sheet_is_known_after_a_few_phases() -> None:
    slow = {"gemm": 300.0, "begin": 60.0}
    found = calibrated(phases(6, slow))
    for nominal, seconds in phases(20, slow, seed=1):
        assert found.predict(nominal).seconds == pytest.approx(seconds, rel=0.1)


def test_one_phase_that_was_disturbed_does_not_throw_over_what_is_known() -> None:
    known = calibrated(phases(40, TRUE))
    nominal, seconds = phases(1, TRUE, seed=3)[0]
    disturbed = known.after(nominal, 30 * seconds)
    assert disturbed.predict(nominal).seconds < 1.5 * seconds


names = st.sampled_from(["a", "b", "c", "d"])
measured = st.lists(st.tuples(st.dictionaries(names, st.floats(0, 1e3), max_size=4), st.floats(1e-6, 1e5)), max_size=30)


@given(measured, st.dictionaries(names, st.floats(0, 1e3), max_size=4))
def test_whatever_was_measured_predictions_are_numbers_and_factors_positive(
    given: list[tuple[dict[str, float], float]], asked: dict[str, float]
) -> None:
    found = calibrated(given)
    predicted = found.predict(asked)
    assert math.isfinite(predicted.seconds) and predicted.seconds >= 0
    assert math.isfinite(predicted.spread) and 0 <= predicted.confidence <= 1
    assert (found.factors > 0).all()


def test_it_survives_being_written_down() -> None:
    found = calibrated(phases(10, TRUE, noise=0.1))
    again = Calibration.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.classes == found.classes and again.predict({"gemm": 1.0}) == found.predict({"gemm": 1.0})


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_nothing_is_learned_from_what_is_no_duration(seconds: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        Calibration().after({"gemm": 1.0}, seconds)
    assert refused.value.details["field"] == "seconds"


@pytest.mark.parametrize("amount", [math.nan, math.inf, -1.0])
def test_operations_that_are_no_amount_are_named(amount: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        Calibration().predict({"gemm": amount})
    assert refused.value.details["field"] == "gemm"
