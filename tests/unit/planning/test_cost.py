"""A whole step, predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus_common.core.ids import ModelStage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.core.workflow import rl_workflow
from nereus_common.planning.calibration import Calibration
from nereus_common.planning.cost import step_cost
from nereus_common.planning.hardware import cluster_of
from nereus_common.planning.job import SYNC, Job
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

EIGHT_BILLION = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
NAMES = [ModelStage.parse(name) for name in ("actor/generation", "actor/training", "reference/inference")]
CLUSTER = cluster_of("h100", 2)
JOB = Job(
    rl_workflow(reference=True),
    dict.fromkeys(NAMES, EIGHT_BILLION),
    Workload(groups=64, samples=8, prompt=256, responses=(512.0, 1024.0, 4096.0)),
    {"reward functions": 0.5},
)


def plan(generation: str = "tp2.pp1.fs1 x4", training: str = "tp4.pp1.fs2", staleness: int | None = None) -> Plan:
    def stage(text: str, first: int, limits: GenerationLimits | None = None) -> StagePlan:
        layout, replicas = parse_replicated(text)
        devices = CLUSTER.devices[first : first + layout.ranks * replicas]
        return StagePlan(layout, devices, replicas, microbatch_tokens=8192, generation=limits)

    limits = GenerationLimits(max_sequences=256, max_length=8192, max_batched_tokens=8192, kv_bytes=40 << 30)
    stages = (stage(generation, 0, limits), stage(training, 8), stage("tp4.pp1.fs1 x2", 8))
    return Plan(tuple(zip(NAMES, stages, strict=True)), ((NAMES[1], NAMES[2]),), staleness)


def test_a_step_is_the_sum_of_what_runs_one_after_the_other() -> None:
    found = step_cost(JOB, plan(), CLUSTER, Calibration())
    seconds = {name: task.seconds for name, task in found.tasks.items()}
    chain = seconds["rollouts"] + max(seconds["reference"], 0.5) + seconds["update actor"] + seconds[SYNC]
    assert found.seconds == pytest.approx(chain)
    assert 0 < found.confidence < 0.6, "nothing was measured yet"


def test_an_asynchronous_step_takes_the_longer_of_its_halves() -> None:
    found = step_cost(JOB, plan(staleness=1), CLUSTER, Calibration())
    seconds = {name: task.seconds for name, task in found.tasks.items()}
    rest = max(seconds["reference"], 0.5) + seconds["update actor"]
    assert found.seconds == pytest.approx(max(seconds["rollouts"], rest) + seconds[SYNC])


def test_what_was_measured_under_one_plan_predicts_another() -> None:
    """Where all classes are half as fast as the first guess, so is a plan that never ran."""
    known = Calibration()
    for layout in ("tp2.pp1.fs1 x4", "tp1.pp1.fs1 x8", "tp4.pp1.fs1 x2", "tp8.pp1.fs1"):
        for training in ("tp4.pp1.fs2", "tp8.pp1.fs1", "tp2.pp2.fs2", "tp1.pp1.fs8"):
            ran = step_cost(JOB, plan(layout, training), CLUSTER, Calibration())
            for name, nominal in ran.nominal.items():
                known = known.after(nominal, 2 * ran.tasks[name].seconds)
    other = plan("tp2.pp1.fs1 x2", "tp2.pp1.fs4")
    guessed, learned = (step_cost(JOB, other, CLUSTER, one) for one in (Calibration(), known))
    assert learned.tasks["update actor"].seconds == pytest.approx(2 * guessed.tasks["update actor"].seconds, rel=0.05)
    assert learned.tasks["rollouts"].seconds == pytest.approx(2 * guessed.tasks["rollouts"].seconds, rel=0.05)
    assert learned.confidence > 0.8 > guessed.confidence


def test_longer_responses_cost_more_everywhere() -> None:
    longer = replace(JOB, workload=replace(JOB.workload, responses=(1024.0, 2048.0, 6144.0)))
    before, after = (step_cost(job, plan(), CLUSTER, Calibration()) for job in (JOB, longer))
    assert all(
        after.tasks[name].seconds > before.tasks[name].seconds for name in ("rollouts", "reference", "update actor")
    )
    assert after.tasks[SYNC] == before.tasks[SYNC]
