"""The main job, end to end, on real parts: five services, vLLM, torch.distributed, UCX, the embedded registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.events import Evaluation, JobEvent, JobState, StateChange, StepReport, SyncReport
from nereus.sync import SyncClient
from tests.system.job_specs import job_spec

pytestmark = pytest.mark.timeout(420)


def _run(client: SyncClient, spec: dict[str, object]) -> list[JobEvent]:
    job = client.submit(spec)
    events = list(job.watch())
    job.get().check()
    return events


def _steps(events: list[JobEvent]) -> list[StepReport]:
    return [event.value for event in events if isinstance(event.value, StepReport)]


def _check_whole(events: list[JobEvent], steps: int) -> None:
    """What every finished job shows, whatever its plan."""
    states = [event.value.state for event in events if isinstance(event.value, StateChange)]
    assert states == [JobState.PLACING, JobState.RUNNING, JobState.SUCCEEDED]
    assert [report.step for report in _steps(events)] == list(range(steps))
    assert [event.value.when for event in events if isinstance(event.value, Evaluation)] == ["before"] * 2 + [
        "after"
    ] * 2
    for report in _steps(events):
        assert report.sync["bytes_moved"] == report.sync["bytes_needed"] > 0
        assert report.logprob_gap_mean <= 1e-4


def test_a_job_learns_on_vllm_with_two_replicas_and_sharded_training(client: SyncClient, tiny_model: Path) -> None:
    spec = job_spec(
        "two-replicas",
        tiny_model,
        generation="tp1.pp1.fs1 x2",
        training="tp1.pp1.fs2",
        reference="tp1.pp1.fs1",
        steps=8,
    )
    events = _run(client, spec)
    _check_whole(events, 8)
    rewards = [report.reward_mean for report in _steps(events)]
    assert sum(rewards[-2:]) > sum(rewards[:2])
    (first,) = [event.value for event in events if isinstance(event.value, SyncReport)]
    assert first.bytes_moved == first.bytes_needed


@pytest.mark.long
def test_the_same_job_runs_under_another_plan_in_its_file(client: SyncClient, tiny_untied_model: Path) -> None:
    spec = job_spec("tensor-parallel", tiny_untied_model, generation="tp2.pp1.fs1", training="tp1.pp2.fs1")
    _check_whole(_run(client, spec), 2)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param("tp2", "tp2.pp1.fs1", marks=pytest.mark.long),
        ("replicated", "tp1.pp1.fs1 x2"),
        pytest.param("uneven", "tp2.pp2(1+1).fs1", marks=pytest.mark.long),
    ],
)
def test_training_layouts_come_from_the_plan(client: SyncClient, tiny_model: Path, name: str, training: str) -> None:
    spec = job_spec(f"plan-{name}", tiny_model, training=training, engine="transformers")
    _check_whole(_run(client, spec), 2)
