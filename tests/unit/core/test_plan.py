from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput, InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Coordinate, Layout
from nereus_common.core.plan import (
    Dtypes,
    GenerationLimits,
    Plan,
    Recompute,
    Residency,
    StagePlan,
    plan_from_dict,
    plan_from_json,
    plan_to_dict,
)

pytestmark = pytest.mark.fast

ACTOR = ModelStage("actor", Stage.TRAINING)
SAMPLER = ModelStage("actor", Stage.GENERATION)
positive = st.integers(1, 1 << 40)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Valid plans with every field drawn; stages on disjoint devices or colocated on the same ones."""
    shared = draw(st.booleans())
    names = draw(
        st.lists(
            st.sampled_from([ModelStage(m, s) for m in ("actor", "critic") for s in Stage]), min_size=1, unique=True
        )
    )
    stages = []
    for index, name in enumerate(names):
        layout = Layout(*(draw(st.integers(1, 3)) for _ in range(3)))
        replicas = draw(st.integers(1, 2))
        node = "node0" if shared else f"node{index}"
        devices = tuple(DeviceId(node, f"gpu{slot}") for slot in range(replicas * layout.ranks))
        limits = GenerationLimits(*(draw(positive) for _ in range(4)), graphs=draw(st.booleans()))
        stages.append(
            (
                name,
                StagePlan(
                    layout,
                    devices,
                    replicas,
                    microbatch_tokens=draw(positive),
                    accumulation=draw(st.none() | positive),
                    recompute=draw(st.sampled_from(Recompute)),
                    dtypes=Dtypes(compute=draw(st.sampled_from(["float32", "bfloat16"]))),
                    idle=draw(st.sampled_from(Residency)),
                    generation=limits if name.stage is Stage.GENERATION else None,
                ),
            )
        )
    return Plan(tuple(stages), (tuple(names),) if shared else (), draw(st.none() | st.integers(0, 9)))


def simple(**changes: Any) -> dict[str, Any]:
    stage = {"layout": "tp2.pp1.fs1 x2", "devices": [f"node0/cpu{slot}" for slot in range(4)]}
    return {"stages": {"actor/training": stage | changes}}


@given(plans())
def test_a_plan_survives_json_with_its_id(plan: Plan) -> None:
    again = plan_from_json(plan.to_json())
    assert again == plan
    assert (again.id, hash(again), again.to_json()) == (plan.id, hash(plan), plan.to_json())
    assert plan_from_dict(plan_to_dict(plan)) == plan


@given(plans(), st.randoms(use_true_random=False))
def test_the_order_in_which_stages_are_listed_does_not_matter(plan: Plan, disorder: Any) -> None:
    stages = list(plan.stages)
    disorder.shuffle(stages)
    assert Plan(tuple(stages), plan.colocated, plan.staleness).id == plan.id


@given(plans())
def test_changing_any_knob_changes_the_id(plan: Plan) -> None:
    name, stage = plan.stages[0]
    changed = plan.with_stage(name, replace(stage, microbatch_tokens=stage.microbatch_tokens + 1))
    assert changed.id != plan.id
    assert changed.names == plan.names


@given(plans())
def test_every_coordinate_of_every_replica_has_its_own_device(plan: Plan) -> None:
    for _, stage in plan.stages:
        found = [
            stage.device(replica, Coordinate(*place))
            for replica in range(stage.replicas)
            for place in map(stage.layout.coordinate, range(stage.layout.ranks))
        ]
        assert tuple(found) == stage.devices
        assert stage.data_parallel == stage.layout.fs * stage.replicas


def test_a_written_plan_needs_only_layout_and_devices() -> None:
    plan = plan_from_dict(simple())
    assert str(plan[ACTOR]) == "tp2.pp1.fs1 x2"
    assert ACTOR in plan
    assert SAMPLER not in plan
    assert len(plan.devices) == 4
    with pytest.raises(InvalidPlan, match=r"no actor/generation.*it has actor/training"):
        plan[SAMPLER]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lay_out": 1}, "plan.stages.actor/training.lay_out is unknown"),
        ({"layout": 5}, "plan.stages.actor/training.layout is 5"),
        ({"layout": "tp2"}, "layout 'tp2'"),
        ({"layout": "tp2.pp1.fs1 x0"}, "replicas is 0"),
        ({"devices": "node0/cpu0"}, "plan.stages.actor/training.devices is 'node0/cpu0'"),
        ({"devices": [1, 2]}, "plan.stages.actor/training.devices is 1"),
        ({"devices": ["node0/cpu0"]}, "needs 4 devices, 1 are given"),
        ({"devices": ["node0/cpu0"] * 4}, "names a device twice"),
        ({"microbatch_tokens": "many"}, "plan.stages.actor/training.microbatch_tokens is 'many'"),
        ({"microbatch_tokens": 1.5}, "plan.stages.actor/training.microbatch_tokens is 1.5"),
        ({"microbatch_tokens": True}, "plan.stages.actor/training.microbatch_tokens is True"),
        ({"microbatch_tokens": 0}, "microbatch_tokens is below 1"),
        ({"accumulation": 0}, "accumulation is below 1"),
        ({"recompute": "half"}, "plan.stages.actor/training.recompute is 'half' .one of none, full"),
        ({"idle": []}, r"plan.stages.actor/training.idle is \[\]"),
        ({"dtypes": 3}, "plan.stages.actor/training.dtypes is 3"),
        ({"dtypes": {"mastr": "float32"}}, "plan.stages.actor/training.dtypes.mastr is unknown"),
        ({"dtypes": {"master": 32}}, "plan.stages.actor/training.dtypes.master is 32"),
        ({"generation": {"max_seqs": 3}}, "plan.stages.actor/training.generation.max_seqs is unknown"),
        ({"generation": {"graphs": 1}}, "plan.stages.actor/training.generation.graphs is 1"),
        ({"generation": {}}, "actor/training: generation limits belong to generation"),
    ],
)
def test_a_wrong_field_of_a_stage_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPlan, match=field):
        plan_from_dict(simple(**change))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "plan.stages is missing"),
        ([], r"plan is \[\]"),
        ({"stages": 3}, "plan.stages is 3"),
        ({"stages": {"actor/training": 3}}, "plan.stages.actor/training is 3"),
        ({"stages": {"actor/training": {"devices": []}}}, "plan.stages.actor/training.layout is missing"),
        ({"stages": {"actor/training": {"layout": "tp1.pp1.fs1"}}}, "plan.stages.actor/training.devices is missing"),
        ({"stages": {"actor": {}}}, "model-stage 'actor'"),
        (simple() | {"epochs": 1}, "plan.epochs is unknown"),
        (simple() | {"staleness": "x"}, "plan.staleness is 'x'"),
        (simple() | {"colocated": 3}, "plan.colocated is 3"),
        (simple() | {"colocated": ["actor/training"]}, "plan.colocated is 'actor/training'"),
        (simple() | {"colocated": [["critic/training"]]}, "colocated names critic/training"),
    ],
)
def test_a_wrong_field_of_the_plan_is_refused_by_name(data: Any, field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        plan_from_dict(data)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="not JSON"):
        plan_from_json("{")


def test_stages_share_a_device_only_when_they_are_colocated() -> None:
    device = (DeviceId("node0", "gpu0"),)
    stages = ((ACTOR, StagePlan(Layout(), device)), (ModelStage("critic", Stage.TRAINING), StagePlan(Layout(), device)))
    with pytest.raises(InvalidPlan, match="both use node0/gpu0"):
        Plan(stages)
    assert Plan(stages, (tuple(name for name, _ in stages),)).devices == device
    with pytest.raises(InvalidPlan, match="appears twice"):
        Plan((stages[0], stages[0]))


def test_a_generation_stage_must_have_limits() -> None:
    with pytest.raises(InvalidPlan, match="actor/generation"):
        Plan(((SAMPLER, StagePlan(Layout(), (DeviceId("n", "g"),))),))


def test_every_field_of_a_stage_is_in_its_written_form() -> None:
    written = plan_to_dict(plan_from_dict(simple()))["stages"]["actor/training"]
    assert set(written) == {field.name for field in fields(StagePlan)} - {"replicas"}
    assert json.loads(json.dumps(written)) == written
