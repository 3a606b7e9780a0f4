"""A job under way, followed with made-up hardware: what is measured is what a hidden calibration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest

from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.core.workflow import rl_workflow
from nereus_common.planning.calibration import Calibration
from nereus_common.planning.cost import step_cost
from nereus_common.planning.drift import LENGTH, POOL
from nereus_common.planning.hardware import Cluster, NodeKind, Processor
from nereus_common.planning.job import SYNC, Job
from nereus_common.planning.pilot import SETTLING, Measured, Pilot, after_step, looked, moved, predicted, targets
from nereus_common.planning.registered import cluster_from
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

MODEL = ModelShape("llama", 8, 1024, 4096, 16, 8, 64, 32000, tied=False)
CHIP = Processor("chip", MappingProxyType({"float32": 2e12, "bfloat16": 2e13}), 24 << 30, 4e11)
CLUSTER = Cluster({f"node{number}": NodeKind(CHIP, 4, 5e10, 1e10) for number in range(2)})
GENERATION, TRAINING = ModelStage.parse("actor/generation"), ModelStage.parse("actor/training")
WORK = Workload(32, 8, 100, (100.0, 300.0))
WORKFLOW = rl_workflow()
JOB = Job(WORKFLOW, dict.fromkeys(WORKFLOW.model_stages, MODEL), WORK, {})
SLOWER = 4.0


def plan(generation: str = "tp1.pp1.fs1 x4", training: str = "tp1.pp4.fs1") -> Plan:
    def stage(text: str, first: int, limits: GenerationLimits | None = None) -> StagePlan:
        layout, replicas = parse_replicated(text)
        devices = CLUSTER.devices[first : first + layout.ranks * replicas]
        return StagePlan(layout, devices, replicas, microbatch_tokens=4096, generation=limits)

    limits = GenerationLimits(max_sequences=32, kv_bytes=1 << 30)
    return Plan(((GENERATION, stage(generation, 0, limits)), (TRAINING, stage(training, 4))))


def seconds(pilot: Pilot, workload: Workload, factor: float = SLOWER) -> Mapping[str, float]:
    """Everything takes `factor` times its nominal seconds."""
    cost = step_cost(replace(JOB, workload=workload), pilot.plan, CLUSTER, Calibration())
    return {name: factor * sum(nominal.values()) for name, nominal in cost.nominal.items()}


def flown(
    pilot: Pilot, steps: int, workload: Workload = WORK, usable: frozenset[DeviceId] = frozenset(CLUSTER.devices)
) -> Pilot:
    for _ in range(steps):
        step = 0 if pilot.measured is None else pilot.measured.step + 1
        pilot = after_step(pilot, Measured(step, workload, seconds(pilot, workload), CLUSTER, usable))
    return pilot


def test_a_plan_settles_before_anything_is_learned() -> None:
    settling = flown(Pilot(JOB, plan()), SETTLING)
    assert settling.calibration == Calibration() or not settling.calibration.classes
    assert not settling.is_due
    assert flown(settling, 1).is_due, "the first look"


def test_what_is_predicted_after_some_steps_is_what_is_measured() -> None:
    pilot = flown(Pilot(JOB, plan()), SETTLING + 6)
    now = predicted(pilot)
    assert now is not None
    assert now.seconds == pytest.approx(sum(seconds(pilot, WORK).values()), rel=0.05)


def test_nothing_is_learned_from_a_step_that_lacks_a_measurement() -> None:
    pilot = flown(Pilot(JOB, plan()), SETTLING + 2)
    for name in ("rollouts", SYNC):
        known = {key: value for key, value in seconds(pilot, WORK).items() if key != name}
        after = after_step(pilot, Measured(9, WORK, known, CLUSTER, frozenset(CLUSTER.devices)))
        assert after.calibration is pilot.calibration
        assert after.measured is pilot.measured


def test_after_a_look_only_drift_makes_it_look_again() -> None:
    pilot = looked(flown(Pilot(JOB, plan()), SETTLING + 4))
    assert not flown(pilot, 6).is_due
    longer = replace(WORK, responses=tuple(2 * length for length in WORK.responses))
    drifted = flown(pilot, 1, longer)
    assert drifted.drift is not None and set(drifted.drift.due) == {LENGTH}
    assert not looked(drifted).is_due


def test_a_lost_device_of_the_plan_is_urgent_and_all_targets_leave_it() -> None:
    pilot = looked(flown(Pilot(JOB, plan()), SETTLING + 4))
    gone = CLUSTER.devices[5]
    usable = frozenset(CLUSTER.devices) - {gone}
    pilot = flown(pilot, 1, usable=usable)
    assert pilot.urgent and pilot.drift is not None and POOL in pilot.drift.due
    assert predicted(pilot) is None
    found = targets(pilot)
    assert found and all(set(one.plan.devices) <= usable for one in found)


def test_targets_are_near_the_best_and_never_the_plan_in_force() -> None:
    pilot = flown(Pilot(JOB, plan()), SETTLING + 6)
    found = targets(pilot)
    costs = [one.cost.seconds for one in found]
    assert costs == sorted(costs) and costs[-1] <= 1.05 * costs[0]
    now = predicted(pilot)
    assert now is not None and costs[0] < now.seconds
    best = moved(pilot, found[0].plan)
    assert best.steps == 0 and not best.is_due
    again = targets(flown(best, SETTLING + 1))
    assert all(one.plan != found[0].plan for one in again)


def test_a_pinned_model_stage_stays_in_all_targets() -> None:
    pilot = flown(Pilot(JOB, plan()), SETTLING + 2)
    for one in targets(pilot, [TRAINING]):
        assert (one.plan[TRAINING].layout, one.plan[TRAINING].replicas) == (plan()[TRAINING].layout, 1)


def test_a_horizon_is_what_is_left_until_a_drift_has_come_back() -> None:
    pilot = looked(flown(Pilot(JOB, plan()), SETTLING + 4))
    longer = replace(WORK, responses=tuple(2 * length for length in WORK.responses))
    first = flown(pilot, 1, longer)
    assert first.horizon(50) == 50
    second = flown(looked(first), 3)
    assert second.drift is not None and LENGTH in second.drift.due
    assert second.horizon(50) < 5


@dataclass(frozen=True)
class Slot:
    id: DeviceId
    kind: str
    memory_bytes: int


def test_registered_devices_are_a_cluster_with_what_others_left_of_their_budgets() -> None:
    slots = [Slot(DeviceId("node0", f"gpu{number}"), "NVIDIA H100 80GB HBM3", 80 << 30) for number in (0, 1, 3)]
    found = cluster_from(slots, {slots[0].id: 30 << 30})
    assert found.nodes["node0"].processor.name == "h100"
    assert [found.budget(slot.id) >> 30 for slot in slots] == [50, 80, 80]
    cores = cluster_from([Slot(DeviceId("a", "cpu0"), "cpu", 1 << 30), Slot(DeviceId("b", "cpu0"), "cpu", 1 << 30)], {})
    assert {kind.processor.name for kind in cores.nodes.values()} == {"cpu"}


@pytest.mark.parametrize("slot", [("gpu0", "Etched Sohu"), ("gpu-a", "NVIDIA H100")])
def test_a_device_of_which_nothing_is_known_is_named(slot: tuple[str, str]) -> None:
    name, kind = slot
    with pytest.raises(Exception, match="node7/gpu"):
        cluster_from([Slot(DeviceId("node7", name), kind, 1)], {})
