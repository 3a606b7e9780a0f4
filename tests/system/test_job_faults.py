"""What goes wrong is named, ends only the job it concerns, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import down
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.events import JobState, StepReport
from nereus.sync import SyncClient, SyncJobHandle
from nereus_common.core.errors import Conflict, InvalidInput
from nereus_common.workers import processes
from tests.system.job_specs import job_spec
from tests.system.workers_of_jobs import worker_pid

pytestmark = pytest.mark.timeout(300)
FOREVER = 10_000


def _failure(client: SyncClient, spec: dict[str, object]) -> tuple[str, str]:
    job = client.submit(spec)
    list(job.watch())
    found = job.get()
    assert found.state is JobState.FAILED
    return found.error_reason, found.error_message


def _wait_for_step(job: SyncJobHandle) -> None:
    for event in job.watch():
        if isinstance(event.value, StepReport):
            return
    raise AssertionError(f"the job ended before its first step: {job.get()}")


def _grants(client: SyncClient) -> int:
    return sum(device.granted_bytes for device in client.cluster_status().devices)


def test_an_unknown_key_names_the_field_and_the_nearest_one(client: SyncClient, tiny_model: Path) -> None:
    with pytest.raises(InvalidInput, match=r"setps.*steps"):
        client.submit({**job_spec("unknown-key", tiny_model), "setps": 3})


def test_a_missing_model_is_named(client: SyncClient, tmp_path: Path) -> None:
    reason, message = _failure(client, job_spec("no-model", tmp_path / "nowhere"))
    assert reason == "NOT_FOUND"
    assert "nowhere" in message


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(client: SyncClient, tiny_model: Path) -> None:
    reason, message = _failure(client, job_spec("tp3", tiny_model, training="tp3.pp1.fs1"))
    assert reason in ("INVALID_PLAN", "UNSUPPORTED_BY_ENGINE")
    assert "tp" in message
    assert "1, 2" in message


def test_more_devices_than_exist_are_refused(client: SyncClient, tiny_model: Path) -> None:
    reason, message = _failure(client, job_spec("too-many", tiny_model, training="tp1.pp1.fs8"))
    assert reason == "RESOURCE_EXHAUSTED"
    assert "node0/cpu8" in message


@pytest.mark.parametrize(("reward", "said"), [("raises", "ZeroDivisionError"), ("hangs", "did not finish")])
def test_a_reward_that_fails_is_named_and_only_its_job_ends(
    client: SyncClient, tiny_model: Path, reward: str, said: str
) -> None:
    path = f"{Path(__file__).parent / 'rewards.py'}:{reward}"
    spec = job_spec(f"reward-{reward}", tiny_model, engine="transformers")
    spec["rewards"] = [{"name": path, "timeout_seconds": 1.0}]
    reason, message = _failure(client, spec)
    assert reason == "JOB_FAILED"
    assert reward in message
    assert said in message
    assert _grants(client) == 0


def test_another_spec_under_a_taken_name_is_refused(client: SyncClient, tmp_path: Path) -> None:
    spec = job_spec("taken", tmp_path / "nowhere")
    client.submit(spec, job_id="taken")
    assert client.submit(spec, job_id="taken").id == "taken"
    with pytest.raises(Conflict, match="another spec"):
        client.submit({**spec, "steps": 3}, job_id="taken")


def test_too_large_a_gap_stops_the_job_and_says_so(client: SyncClient, tiny_model: Path) -> None:
    spec = job_spec("gap", tiny_model, engine="transformers", max_logprob_gap=1e-12)
    reason, message = _failure(client, spec)
    assert reason == "JOB_FAILED"
    assert "log-prob gap" in message


def test_a_cancelled_job_gives_its_devices_back(client: SyncClient, tiny_model: Path) -> None:
    job = client.submit(job_spec("cancelled", tiny_model, engine="transformers", steps=FOREVER))
    _wait_for_step(job)
    assert _grants(client) > 0
    job.cancel()
    assert job.get().state is JobState.CANCELLED
    assert _grants(client) == 0


@pytest.mark.parametrize("victim", ["training", pytest.param("generation", marks=pytest.mark.long)])
def test_a_killed_worker_ends_its_job_by_name_and_other_jobs_live(
    client: SyncClient, cluster: ClusterState, tiny_model: Path, victim: str
) -> None:
    doomed = client.submit(job_spec(f"doomed-{victim}", tiny_model, engine="transformers", steps=FOREVER))
    _wait_for_step(doomed)
    bystander_spec = job_spec(f"bystander-{victim}", tiny_model, engine="transformers", steps=3)
    for stage in bystander_spec["plan"]["stages"].values():
        stage["devices"] = [device.replace("cpu0", "cpu4").replace("cpu1", "cpu5") for device in stage["devices"]]
    bystander = client.submit(bystander_spec)
    os.kill(worker_pid(cluster, f"doomed-{victim}", victim), signal.SIGKILL)
    list(doomed.watch())
    found = doomed.get()
    assert (found.state, found.error_reason) == (JobState.FAILED, "PROCESS_LOST")
    assert f"doomed-{victim}" in found.error_message
    list(bystander.watch())
    assert bystander.get().state is JobState.SUCCEEDED
    assert _grants(client) == 0


def test_a_killed_service_ends_its_job_by_name_and_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "data")
    state = up(folder, ClusterConfig(devices={"cpu0": 5 << 30, "cpu1": 5 << 30}))
    try:
        with SyncClient.connect(state.controller) as client:
            job = client.submit(job_spec("orphan", tiny_model, engine="transformers", steps=FOREVER))
            _wait_for_step(job)
            training = state.member("training")
            assert training is not None
            os.kill(training.pid, signal.SIGKILL)
            list(job.watch())
            found = job.get()
        assert (found.state, found.error_reason) == (JobState.FAILED, "PROCESS_LOST")
        assert "the training service on node0 is gone" in found.error_message
        assert "`nereus up`" in found.error_message
        assert any("training listens on" in line for line in found.error_log)
    finally:
        left = down(folder)
    assert not left.killed
    assert not processes.marked(state.mark, processes.snapshot())
