"""A job goes on from its last checkpoint: asked to, under another plan, and by itself when a process was lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.events import Checkpoint, JobEvent, JobState, Restart, StateChange, StepReport
from nereus.sync import SyncClient, SyncJobHandle
from nereus_common.core.errors import Conflict, InvalidInput, NotFound
from tests.system.job_specs import job_spec
from tests.system.workers_of_jobs import worker_pid

pytestmark = pytest.mark.timeout(420)
AUTO = {"every": 2, "resume": "auto"}


def spec_of(name: str, model: Path, steps: int, checkpoint: dict[str, object], **more: Any) -> dict[str, Any]:
    return job_spec(
        name, model, engine="transformers", steps=steps, checkpoint=checkpoint, evaluation={"size": 0}, **more
    )


def follow(job: SyncJobHandle, wanted: Callable[[JobEvent], bool]) -> list[JobEvent]:
    """Events up to the first that is wanted."""
    seen = []
    for event in job.watch():
        seen.append(event)
        if wanted(event):
            return seen
    raise AssertionError(f"the job ended before: {job.get()}")


def saved(step: int) -> Callable[[JobEvent], bool]:
    return lambda event: isinstance(event.value, Checkpoint) and event.value.step >= step


def steps_of(events: list[JobEvent]) -> list[int]:
    return [event.value.step for event in events if isinstance(event.value, StepReport)]


def restarts_of(events: list[JobEvent]) -> list[Restart]:
    return [event.value for event in events if isinstance(event.value, Restart)]


def running_epochs(events: list[JobEvent]) -> list[int]:
    changes = [event.value for event in events if isinstance(event.value, StateChange)]
    return [change.epoch for change in changes if change.state is JobState.RUNNING]


def check_goes_on(events: list[JobEvent], steps: int) -> None:
    """Whatever happened in between, every attempt did the steps from its start on, one after the other, to the end."""
    expected = 0
    for event in events:
        if isinstance(event.value, Restart):
            assert event.value.from_step <= expected
            expected = event.value.from_step
        elif isinstance(event.value, StepReport):
            assert event.value.step == expected
            expected += 1
    assert expected == steps


def granted(client: SyncClient) -> int:
    return sum(device.granted_bytes for device in client.cluster_status().devices)


def test_a_cancelled_job_goes_on_from_its_checkpoint_under_another_plan_and_with_more_steps(
    client: SyncClient, tiny_model: Path
) -> None:
    job = client.submit(spec_of("again", tiny_model, 10_000, {"every": 2}))
    with pytest.raises(Conflict, match=r"still .*nereus job cancel"):
        job.resume()
    follow(job, saved(2))
    job.cancel()
    before = job.get()
    assert before.checkpoint_step >= 2 and before.checkpoint_step % 2 == 0

    steps = before.checkpoint_step + 2
    wider = spec_of("again", tiny_model, steps, {}, training="tp2.pp1.fs1")["plan"]
    with pytest.raises(InvalidInput, match="actor/training"):
        job.resume(plan={"stages": {"actor/generation": wider["stages"]["actor/generation"]}})
    with pytest.raises(InvalidInput, match="ask for more"):
        job.resume(steps=1)
    resumed = job.resume(plan=wider, steps=steps)
    assert (resumed.id, resumed.steps_done, resumed.ended) == (job.id, before.checkpoint_step, None)

    events = list(job.watch())
    done = job.get()
    assert (done.state, done.steps_done, done.checkpoint_step) == (JobState.SUCCEEDED, steps, steps)
    assert done.plan is not None and str(dict(done.plan.stages)[done.plan.names[1]].layout) == "tp2.pp1.fs1"
    check_goes_on(events, steps)
    assert [(r.attempt, r.from_step, r.reason) for r in restarts_of(events)] == [(2, before.checkpoint_step, "RESUMED")]
    assert running_epochs(events) == [1, 2] and done.epoch == 2
    lines = (Path(done.folder) / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(events)

    with pytest.raises(InvalidInput, match="ask for more"):
        job.resume()
    job.resume(steps=steps + 1)
    assert job.wait().steps_done == steps + 1
    assert granted(client) == 0


def test_a_job_without_a_checkpoint_cannot_be_resumed(client: SyncClient, tiny_model: Path) -> None:
    job = client.submit(spec_of("unsaved", tiny_model, 1, {}))
    job.wait()
    with pytest.raises(NotFound, match=r"no complete checkpoint.*checkpoint\.every"):
        job.resume(steps=2)
    assert job.get().state is JobState.SUCCEEDED


def test_a_job_whose_worker_is_killed_goes_on_by_itself_if_its_file_says_so(
    client: SyncClient, cluster: ClusterState, tiny_model: Path
) -> None:
    job = client.submit(spec_of("tough", tiny_model, 10, AUTO))
    follow(job, saved(2))
    os.kill(worker_pid(cluster, "tough", "training"), signal.SIGKILL)
    events = list(job.watch())
    job.get().check()
    check_goes_on(events, 10)
    (restart,) = restarts_of(events)
    assert (restart.attempt, restart.reason) == (2, "PROCESS_LOST")
    assert restart.from_step >= 2 and restart.from_step % 2 == 0
    assert running_epochs(events) == [1, 2]
    assert granted(client) == 0


def kill(state: ClusterState, *names: str) -> None:
    for name in names:
        victim = state.member(name)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while victim.alive and time.monotonic() < until:
            time.sleep(0.05)


def test_after_the_controller_was_killed_each_job_goes_on_or_ends_as_its_file_says(
    own: tuple[ClusterFolder, ClusterConfig, ClusterState], tiny_model: Path
) -> None:
    folder, config, state = own
    other = spec_of("by-hand", tiny_model, 10_000, {"every": 2})
    for stage in other["plan"]["stages"].values():
        stage["devices"] = [device.replace("cpu0", "cpu2").replace("cpu1", "cpu3") for device in stage["devices"]]
    with SyncClient.connect(state.controller) as client:
        auto, manual = client.submit(spec_of("auto", tiny_model, 300, AUTO)), client.submit(other)
        follow(auto, saved(2))
        follow(manual, saved(2))
    kill(state, "controller")
    with SyncClient.connect(up(folder, config).controller) as client:
        auto, manual = client.job(auto.id), client.job(manual.id)
        list(manual.watch())
        ended = manual.get()
        assert (ended.state, ended.error_reason) == (JobState.FAILED, "PROCESS_LOST")
        assert f"`nereus job resume {manual.id}`" in ended.error_message
        restart = follow(auto, lambda event: isinstance(event.value, Restart))[-1].value
        assert isinstance(restart, Restart) and restart.reason == "PROCESS_LOST"
        follow(auto, lambda event: isinstance(event.value, Checkpoint) and event.value.step > restart.from_step)
        assert auto.get().epoch == 2
        units = [unit for device in client.cluster_status().devices for unit in device.units]
        assert units and all(unit.startswith(f"{auto.id}.") and ".e2." in unit for unit in units), units
        auto.cancel()
        assert granted(client) == 0


def test_a_job_waits_for_a_killed_service_and_goes_on_when_it_is_back(
    own: tuple[ClusterFolder, ClusterConfig, ClusterState], tiny_model: Path
) -> None:
    folder, config, state = own
    with SyncClient.connect(state.controller) as client:
        job = client.submit(spec_of("patient", tiny_model, 300, AUTO))
        follow(job, saved(2))
        kill(state, "training")
        seen = follow(job, lambda event: event.kind == "log" and "waiting for training" in event.payload["message"])
        assert "training service on node0 is gone" in restarts_of(seen)[0].message
        up(folder, config)
        again = restarts_of(seen)[0].from_step
        events = follow(job, lambda event: isinstance(event.value, Checkpoint) and event.value.step > again)
        assert len(restarts_of(events)) == 1
        job.cancel()
