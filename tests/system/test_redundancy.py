"""With redundancy a job that loses a training process goes on from the step it was at, without a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nereus.cluster.state import ClusterState
from nereus.events import JobState, StepReport
from nereus.sync import SyncClient
from nereus_common.core.errors import JobFailed
from nereus_common.core.ids import ModelStage
from nereus_common.workers import processes
from tests.system.job_specs import job_spec
from tests.system.test_exact_resume import numbers, told
from tests.system.test_resume import check_goes_on, follow, granted, restarts_of, steps_of
from tests.system.test_transitions import units_of

pytestmark = pytest.mark.timeout(420)
STEPS = 6
GRPO = {"name": "grpo", "groups_per_step": 4, "samples_per_group": 4}
PPO = {"name": "ppo", "groups_per_step": 4, "samples_per_group": 4, "minibatches": 2, "kl": {"beta": 0.05}}
CRITIC = {"critic/training": "tp1.pp1.fs1", "critic/inference": "tp1.pp1.fs1"}


def spec_of(name: str, model: Path, algorithm: dict[str, Any], **more: Any) -> dict[str, Any]:
    ppo = algorithm is PPO
    spec = job_spec(
        name,
        model,
        training="tp1.pp1.fs2",
        reference="tp1.pp1.fs1" if ppo else None,
        others=CRITIC if ppo else None,
        engine="transformers",
        steps=STEPS,
        evaluation={"size": 0},
        redundancy=1,
        **more,
    )
    spec["algorithm"] = algorithm
    if ppo:
        spec["models"]["critic"] = str(model)
    return spec


def pid_of(cluster: ClusterState, name: str) -> int:
    """Of the worker of that name, which is the end of its command line."""
    found = [
        one.pid
        for one in processes.marked(cluster.mark, processes.snapshot())
        if Path(f"/proc/{one.pid}/cmdline").read_text().rstrip("\0 ").endswith(name)
    ]
    assert len(found) == 1, (name, found)
    return found[0]


def after_step(step: int) -> Any:
    return lambda event: isinstance(event.value, StepReport) and event.value.step >= step


@pytest.mark.parametrize(
    ("algorithm", "victim"),
    [
        pytest.param(GRPO, "actor.training.e1.r0.1", id="grpo"),
        pytest.param(PPO, "critic.training.e1.r0.0", id="ppo", marks=pytest.mark.long),
    ],
)
def test_a_job_whose_rank_is_killed_ends_with_the_numbers_of_one_that_ran_through(
    client: SyncClient, cluster: ClusterState, tiny_model: Path, algorithm: dict[str, Any], victim: str
) -> None:
    whole = client.submit(spec_of("whole", tiny_model, algorithm, rollouts={"record": True}))
    uncut = told(list(whole.watch()))
    replay = {"replay": str(Path(whole.get().check().folder) / "rollouts")}
    cut = client.submit(spec_of("cut", tiny_model, algorithm, rollouts=replay))
    follow(cut, after_step(0))
    os.kill(pid_of(cluster, f"{cut.id}.actor.training.e1.r0.0.mirror"), signal.SIGKILL)  # there will be another
    begun = follow(cut, after_step(2))
    os.kill(pid_of(cluster, f"{cut.id}.{victim}"), signal.SIGKILL)
    events = list(cut.watch())
    assert cut.get().check().state is JobState.SUCCEEDED
    (restart,) = restarts_of(events)
    assert restart.reason in ("PROCESS_LOST", "UNAVAILABLE"), "whoever misses it first"
    assert restart.from_step >= len(steps_of(begun))
    check_goes_on(events, STEPS)
    assert {step: numbers(one) for step, one in told(events).items()} == {
        step: numbers(one) for step, one in uncut.items()
    }
    assert granted(client) == 0


@pytest.mark.long
def test_what_a_transition_makes_has_copies_too(client: SyncClient, cluster: ClusterState, tiny_model: Path) -> None:
    """The rank is lost after the move: the job goes on under the plan that it led to."""
    layout = {"layout": "tp1.pp2.fs1", "devices": ["node0/cpu3", "node0/cpu4"]}
    move = {"after_step": 2, "plan": {"stages": {"actor/training": layout}}}
    job = client.submit(spec_of("moves", tiny_model, GRPO, moves=[move]))
    follow(job, after_step(3))
    os.kill(pid_of(cluster, f"{job.id}.actor.training.e2.r0.1"), signal.SIGKILL)
    events = list(job.watch())
    done = job.get().check()
    assert done.plan is not None and str(done.plan[ModelStage.parse("actor/training")].layout) == "tp1.pp2.fs1"
    (restart,) = restarts_of(events)
    assert restart.from_step >= 4
    check_goes_on(events, STEPS)
    assert granted(client) == 0


def test_a_job_that_has_lost_its_copies_too_ends_by_name_and_leaves_nothing(
    client: SyncClient, cluster: ClusterState, tiny_model: Path
) -> None:
    """No checkpoint either."""
    job = client.submit(spec_of("both", tiny_model, GRPO) | {"steps": 10_000})
    follow(job, after_step(1))
    victims = [pid_of(cluster, f"{job.id}.actor.training.e1.r0.{name}") for name in ("1", "0.mirror")]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(JobFailed, match=r"cannot be had from copies: .* has no copies"):
        job.wait()
    assert granted(client) == 0 and units_of(client) == set()
