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
from nereus_common.workers import processes
from tests.system.job_specs import job_spec
from tests.system.test_exact_resume import numbers, told
from tests.system.test_resume import check_goes_on, follow, granted, restarts_of, steps_of

pytestmark = pytest.mark.timeout(420)
STEPS = 6


def spec_of(name: str, model: Path, **more: Any) -> dict[str, Any]:
    return job_spec(
        name,
        model,
        training="tp1.pp1.fs2",
        engine="transformers",
        steps=STEPS,
        evaluation={"size": 0},
        redundancy=1,
        **more,
    )


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


def test_a_job_whose_rank_is_killed_ends_with_the_numbers_of_one_that_ran_through(
    client: SyncClient, cluster: ClusterState, tiny_model: Path
) -> None:
    whole = client.submit(spec_of("whole", tiny_model, rollouts={"record": True}))
    uncut = told(list(whole.watch()))
    replay = {"replay": str(Path(whole.get().check().folder) / "rollouts")}
    cut = client.submit(spec_of("cut", tiny_model, rollouts=replay))
    begun = follow(cut, after_step(1))
    os.kill(pid_of(cluster, f"{cut.id}.actor.training.e1.r0.1"), signal.SIGKILL)
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
