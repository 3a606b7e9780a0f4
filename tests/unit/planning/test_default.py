"""The default plan is a fixed rule of the devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.planning.default import default_plan

pytestmark = pytest.mark.fast

GENERATION, TRAINING, REFERENCE = map(ModelStage.parse, ("actor/generation", "actor/training", "reference/inference"))


def devices(count: int) -> list[DeviceId]:
    return [DeviceId("node0", f"cpu{slot}") for slot in range(count)]


def test_four_devices_make_two_generation_replicas_and_two_training_ranks() -> None:
    plan = default_plan(devices(4), (GENERATION, TRAINING))
    assert str(plan[GENERATION]) == "tp1.pp1.fs1 x2"
    assert str(plan[TRAINING]) == "tp1.pp1.fs2"
    assert plan.colocated == ()


def test_one_device_is_shared_in_the_order_of_the_phases() -> None:
    assert default_plan(devices(1), (TRAINING, GENERATION, REFERENCE)).colocated == ((GENERATION, REFERENCE, TRAINING),)


@given(st.integers(1, 40), st.booleans())
def test_every_device_is_used(count: int, with_reference: bool) -> None:
    stages = (GENERATION, TRAINING, REFERENCE) if with_reference else (GENERATION, TRAINING)
    assert set(default_plan(devices(count), stages).devices) == set(devices(count))


def test_no_device_is_no_plan() -> None:
    with pytest.raises(InvalidPlan, match="no device"):
        default_plan([], (GENERATION, TRAINING))
