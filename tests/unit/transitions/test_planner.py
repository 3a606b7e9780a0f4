"""The laws of a transition DAG: acyclic, within memory in every order, and never without a holder."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId
from nereus_common.core.plan import Plan
from nereus_common.transitions.dag import EdgeKind, Mode, Primitive, Side, TransitionDag, UnitSlot
from nereus_common.transitions.needs import InfeasibleTransition
from nereus_common.transitions.planner import plan_transition
from tests.unit.transitions.jobs import (
    ACTOR,
    BUCKET,
    CRITIC,
    REFERENCE,
    ROLLOUT,
    SCORE,
    STATE,
    Witness,
    needs,
    plan,
    pool,
    random_plan,
    stage,
    usage,
)

pytestmark = pytest.mark.fast
D = pool(8)


def dag_of(old: Plan, new: Plan, budget: int) -> TransitionDag:
    return plan_transition(old, new, needs, dict.fromkeys(D, budget), bucket_bytes=BUCKET)


@st.composite
def tight(draw: st.DrawFn) -> TransitionDag:
    """A feasible transition on devices with little to spare beside the old and the new plan."""
    rng = draw(st.randoms(use_true_random=False))
    devices = pool(rng.randint(3, 8))
    names = rng.sample([ACTOR, CRITIC, ROLLOUT, SCORE, REFERENCE], rng.randint(1, 5))
    old, new = random_plan(rng, names, devices), random_plan(rng, names, devices)
    both = [usage(side) for side in (old, new)]
    spare = rng.choice([10, 30, 60, 120, 240])
    budgets = {device: max(side.get(device, 0) for side in both) + spare for device in devices}
    try:
        return plan_transition(old, new, needs, budgets, bucket_bytes=BUCKET)
    except InfeasibleTransition:
        assume(False)
        raise


@settings(max_examples=40)
@given(tight())
def test_every_edge_leads_from_an_earlier_node_to_a_later_one(dag: TransitionDag) -> None:
    assert [node.id for node in dag.nodes] == list(range(len(dag.nodes)))
    assert all(edge.before < edge.after for edge in dag.edges)


@settings(max_examples=150)
@given(tight(), st.randoms(use_true_random=False))
def test_every_order_keeps_every_device_within_its_budget_and_every_state_held(
    dag: TransitionDag, rng: random.Random
) -> None:
    witness = Witness.of(dag)
    witness.run(rng)
    for device, budget in dag.budgets.items():
        assert witness.peaks[device] <= dag.peaks[device] <= budget
    assert {device: size for device, size in witness.use.items() if size} == usage(dag.new)


@settings(max_examples=40)
@given(tight())
def test_every_new_unit_is_kept_or_made_once_and_every_other_old_unit_ends_once(dag: TransitionDag) -> None:
    made = [slot for node in dag.nodes for slot in node.targets]
    ended = [slot for node in dag.nodes if node.primitive is Primitive.DESTROY for slot in node.sources]
    assert len(set(made)) == len(made) and len(set(ended)) == len(ended)
    assert sorted(map(str, [*made, *dag.kept.values()])) == sorted(map(str, slots(dag.new, "new")))
    assert sorted(map(str, [*ended, *dag.kept])) == sorted(map(str, slots(dag.old, "old")))


def slots(of: Plan, side: str) -> list[str]:
    return [f"{name}.{side}.r{replica}" for name, entry in of.stages for replica in range(entry.replicas)]


@settings(max_examples=40)
@given(tight())
def test_a_unit_ends_after_all_who_read_it(dag: TransitionDag) -> None:
    ends = {node.sources[0]: node.id for node in dag.nodes if node.primitive is Primitive.DESTROY}
    data = {(edge.before, edge.after) for edge in dag.edges if edge.kind is EdgeKind.DATA}
    for node in dag.nodes:
        if node.primitive is not Primitive.DESTROY:
            assert all((node.id, ends[slot]) in data for slot in node.sources if slot in ends)


@settings(max_examples=40)
@given(tight())
def test_resource_edges_lead_from_what_frees_to_what_acquires_on_the_same_device(dag: TransitionDag) -> None:
    for before, after, kind in dag.edges:
        if kind is EdgeKind.RESOURCE:
            freed = set(dag.nodes[before].frees) | set(dag.nodes[before].acquires)
            assert freed & set(dag.nodes[after].acquires)


@settings(max_examples=40)
@given(tight())
def test_with_room_for_both_plans_nothing_waits_for_memory_and_nothing_works_in_place(dag: TransitionDag) -> None:
    both = [usage(dag.old), usage(dag.new)]
    ample = {device: sum(side.get(device, 0) for side in both) for device in dag.budgets}
    wide = plan_transition(dag.old, dag.new, needs, ample, bucket_bytes=BUCKET)
    assert all(edge.kind is EdgeKind.DATA for edge in wide.edges)
    assert all(node.mode is Mode.SHADOW for node in wide.nodes)


def test_devices_handed_over_wait_for_the_end_of_their_tenant() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:4]), CRITIC: stage(CRITIC, "tp1.pp1.fs2", D[4:6])})
    new = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:2]), CRITIC: stage(CRITIC, "tp1.pp1.fs2", D[2:6])})
    dag = plan_transition(old, new, needs, dict.fromkeys(D, 170), bucket_bytes=BUCKET)
    ends = {node.sources[0]: node.id for node in dag.nodes if node.primitive is Primitive.DESTROY}
    grown = next(node for node in dag.nodes if node.model_stage == CRITIC and node.targets)
    assert (ends[UnitSlot(ACTOR, Side.OLD, 1)], grown.id, EdgeKind.RESOURCE) in dag.edges


def test_a_swap_of_two_full_devices_is_refused_with_the_device_and_the_bytes() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", D[:1]), CRITIC: stage(CRITIC, "tp1.pp1.fs1", D[1:2])})
    new = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", D[1:2]), CRITIC: stage(CRITIC, "tp1.pp1.fs1", D[:1])})
    with pytest.raises(InfeasibleTransition, match="bytes are lacking") as refused:
        dag_of(old, new, 300)
    assert refused.value.details["device"] in {str(D[0]), str(D[1])}
    assert int(refused.value.details["bytes"]) > 0


@pytest.mark.parametrize(("budget", "mode"), [(400, Mode.SHADOW), (250, Mode.IN_PLACE)])
def test_training_moves_in_place_only_where_both_states_do_not_fit(budget: int, mode: Mode) -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:2])})
    new = plan({ACTOR: stage(ACTOR, "tp2.pp1.fs1", D[:2])})
    if mode is Mode.IN_PLACE:
        budget = STATE[ACTOR] // 2 + 2 * 20 + 2 * BUCKET
    dag = dag_of(old, new, budget)
    assert [node.mode for node in dag.nodes if node.targets] == [mode]
    assert dag.peaks[D[0]] <= budget


def test_one_byte_below_the_in_place_peak_is_infeasible() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:2])})
    new = plan({ACTOR: stage(ACTOR, "tp2.pp1.fs1", D[:2])})
    with pytest.raises(InfeasibleTransition) as refused:
        dag_of(old, new, STATE[ACTOR] // 2 + 2 * 20 + 2 * BUCKET - 1)
    assert refused.value.details["bytes"] == "1"


def test_an_engine_without_room_for_another_sleeps_first() -> None:
    old = plan({ROLLOUT: stage(ROLLOUT, "tp1.pp1.fs1", D[:2]), ACTOR: stage(ACTOR, "tp1.pp1.fs1", D[4:5])})
    new = plan({ROLLOUT: stage(ROLLOUT, "tp2.pp1.fs1", D[:2]), ACTOR: stage(ACTOR, "tp1.pp1.fs1", D[4:5])})
    dag = plan_transition(old, new, needs, dict.fromkeys(D, 270), bucket_bytes=BUCKET)
    assert all(node.mode is Mode.SHADOW for node in dag.nodes)
    tight = plan_transition(old, new, needs, {**dict.fromkeys(D, 160), D[4]: 300}, bucket_bytes=BUCKET)
    [made] = [node for node in tight.nodes if node.targets]
    assert made.mode is Mode.IN_PLACE
    assert {str(slot) for slot in made.sources} == {"actor/generation.old.r0", "actor/generation.old.r1"}


def test_a_sole_copy_is_read_before_it_ends_and_a_redundant_one_may_end_first() -> None:
    one = {REFERENCE: stage(REFERENCE, "tp1.pp1.fs1", D[:2])}
    two = {REFERENCE: stage(REFERENCE, "tp2.pp1.fs1", D[:2])}
    dag = dag_of(plan(one), plan(two), 105)
    made = next(node for node in dag.nodes if node.targets)
    first = next(node for node in dag.nodes if node.primitive is Primitive.DESTROY)
    assert first.id < made.id and first.sources != made.sources


def test_units_whose_processes_stay_as_they_are_are_kept() -> None:
    old = plan({ROLLOUT: stage(ROLLOUT, "tp2.pp1.fs1", D[:6]), ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[6:])})
    new = plan({ROLLOUT: stage(ROLLOUT, "tp2.pp1.fs1", D[2:8]), ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[6:])})
    dag = dag_of(old, new, 10_000)
    assert {str(was): str(now) for was, now in dag.kept.items()} == {
        "actor/generation.old.r1": "actor/generation.new.r0",
        "actor/generation.old.r2": "actor/generation.new.r1",
        "actor/training.old.r0": "actor/training.new.r0",
    }


def test_training_is_kept_whole_or_not_at_all() -> None:
    old, new = (plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:count])}) for count in (2, 4))
    dag = dag_of(old, new, 10_000)
    assert not dag.kept
    [made] = [node for node in dag.nodes if node.targets]
    assert made.primitive is Primitive.EXTEND and len(made.targets) == 2
    assert dag_of(old, old, 10_000).nodes == ()


def test_what_others_occupy_is_not_there() -> None:
    old, new = (plan({REFERENCE: stage(REFERENCE, "tp1.pp1.fs1", D[:count])}) for count in (1, 2))
    with pytest.raises(InfeasibleTransition, match=str(D[1])):
        plan_transition(old, new, needs, dict.fromkeys(D, 100), occupied={D[1]: 31})


def test_a_device_without_budget_and_other_model_stages_are_refused() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", D[:1])})
    with pytest.raises(InvalidPlan, match="no budget"):
        plan_transition(old, plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", pool(9)[8:])}), needs, dict.fromkeys(D, 9999))
    with pytest.raises(InvalidPlan, match="only one of the two plans has actor/training"):
        dag_of(old, plan({CRITIC: stage(CRITIC, "tp1.pp1.fs1", D[:1])}), 9999)


def test_devices_equal_by_value_are_the_same_device() -> None:
    again = tuple(DeviceId(device.node, device.slot) for device in D)
    old, new = (plan({REFERENCE: stage(REFERENCE, "tp1.pp1.fs1", devices)}) for devices in (D[:2], again[:2]))
    assert dag_of(old, new, 9999).nodes == ()
