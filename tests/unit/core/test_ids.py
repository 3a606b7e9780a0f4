from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage, check_name, unit_id

pytestmark = pytest.mark.fast

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}\Z")


@given(names, names, st.sampled_from(Stage))
def test_names_are_parsed_from_what_they_print(node: str, slot: str, stage: Stage) -> None:
    assert DeviceId.parse(str(DeviceId(node, slot))) == DeviceId(node, slot)
    assert ModelStage.parse(str(ModelStage(node, stage))) == ModelStage(node, stage)


@pytest.mark.parametrize("text", ["", "-a", ".a", "a b", "a/b", "a\n", "ä", "a" * 64, "{x}", "a:b"])
def test_what_cannot_be_part_of_a_key_is_no_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="the_field") as caught:
        check_name(text, "the_field")
    assert caught.value.details["field"] == "the_field"


@pytest.mark.parametrize("text", ["actor", "actor/cooking", "/training", "actor/training/x"])
def test_a_model_stage_is_a_model_and_one_of_three_stages(text: str) -> None:
    with pytest.raises(InvalidInput):
        ModelStage.parse(text)


@pytest.mark.parametrize("text", ["node0", "/cpu0", "node0/", "a/b/c"])
def test_a_device_is_a_slot_of_a_node(text: str) -> None:
    with pytest.raises(InvalidInput, match="device"):
        DeviceId.parse(text)


def test_a_rebuilt_replica_is_another_unit() -> None:
    stage = ModelStage("actor", Stage.GENERATION)
    assert unit_id(JobId("j"), stage, 1, 0) == "j.actor.generation.e0.r1"
    assert len({unit_id(JobId("j"), stage, replica, epoch) for replica in (0, 1) for epoch in (0, 1)}) == 4
