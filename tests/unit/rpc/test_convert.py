"""Core values are the same after protobuf, and nothing absent is filled in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.v1 import plan_pb2, units_pb2
from nereus_common.core.errors import InvalidInput, InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, GenerationLimits, Plan, Recompute, Residency, StagePlan
from nereus_common.core.transfer import Box, RankRef, Transfer
from nereus_common.rpc import convert

pytestmark = pytest.mark.fast

sizes = st.integers(1, 1 << 31)
degrees = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(degrees)
    split = draw(st.none() | st.lists(st.integers(1, 40), min_size=pp, max_size=pp).map(tuple))
    return Layout(draw(degrees), pp, draw(degrees), 1, split)


@st.composite
def stage_plans(draw: st.DrawFn, stage: Stage, node: str) -> StagePlan:
    layout, replicas = draw(layouts()), draw(degrees)
    limits = st.builds(GenerationLimits, sizes, sizes, sizes, sizes, st.booleans())
    return StagePlan(
        layout,
        tuple(DeviceId(node, f"cpu{number}") for number in range(layout.ranks * replicas)),
        replicas,
        draw(sizes),
        draw(st.none() | sizes),
        draw(st.sampled_from(Recompute)),
        draw(st.builds(Dtypes, *[st.sampled_from(["float32", "bfloat16"])] * 3)),
        draw(st.sampled_from(Residency)),
        draw(limits) if stage is Stage.GENERATION else None,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(
        st.lists(st.builds(ModelStage, st.sampled_from(["actor", "critic"]), st.sampled_from(Stage)), unique=True)
    )
    stages = tuple((name, draw(stage_plans(name.stage, f"node{index}"))) for index, name in enumerate(names))
    colocated = (tuple(names),) if draw(st.booleans()) and names else ()
    return Plan(stages, colocated, draw(st.none() | st.integers(0, 8)))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    pairs = draw(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=4))
    return Box(tuple(map(min, pairs)), tuple(map(max, pairs)))


ranks = st.builds(RankRef, st.text(max_size=9), st.integers(0, 99))


@given(plans())
def test_a_plan_is_the_same_after_the_wire(plan: Plan) -> None:
    wire = plan_pb2.Plan.FromString(convert.plan_to_pb(plan).SerializeToString())
    assert convert.plan_from_pb(wire) == plan


@given(st.builds(Transfer, st.text(max_size=9), boxes(), ranks, ranks, st.integers(0, 99)))
def test_a_transfer_is_the_same_after_the_wire(transfer: Transfer) -> None:
    wire = units_pb2.Transfer.FromString(convert.transfer_to_pb(transfer).SerializeToString())
    assert convert.transfer_from_pb(wire, transfer.target.unit) == transfer


@given(st.dictionaries(st.text(max_size=9).map(TensorName), st.lists(boxes(), max_size=3).map(tuple), max_size=3))
def test_held_boxes_are_the_same_after_the_wire(held: dict[TensorName, tuple[Box, ...]]) -> None:
    assert convert.boxes_from_pb(convert.boxes_to_pb(held)) == held


def stage() -> plan_pb2.StagePlan:
    plan = StagePlan(Layout(), (DeviceId("node0", "cpu0"),))
    return convert.stage_plan_to_pb(ModelStage.parse("actor/training"), plan)


@pytest.mark.parametrize("field", ["layout", "dtypes", "recompute", "idle", "replicas", "microbatch_tokens", "devices"])
def test_an_absent_field_is_refused_by_name(field: str) -> None:
    message = stage()
    message.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match=field):
        convert.stage_plan_from_pb(message)


def test_a_stage_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="MODEL/STAGE"):
        convert.stage_plan_from_pb(plan_pb2.StagePlan())
