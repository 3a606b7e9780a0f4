"""The client against a controller that follows a script: values come out, errors keep their kind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nereus import Client, JobEvent, JobSpec, JobState, StepReport, errors
from nereus.sync import SyncClient
from nereus.v1 import jobs_pb2 as pb
from tests.service.scripted_controller import PLAN, ScriptedController, scripted_controller

SPEC: dict[str, Any] = {"model": "/m", "prompts": {"task": "gcd"}, "rewards": ["exact_answer"]}


@pytest.fixture
async def controller() -> AsyncIterator[tuple[ScriptedController, str]]:
    async with scripted_controller() as running:
        yield running


@pytest.fixture
async def client(controller: tuple[ScriptedController, str]) -> AsyncIterator[Client]:
    async with Client.connect(controller[1]) as connected:
        yield connected


async def test_a_submitted_job_can_be_asked_for_and_listed(client: Client) -> None:
    handle = await client.submit(SPEC, job_id="one")
    job = await handle.get()
    assert (job.id, job.state, job.plan) == ("one", JobState.RUNNING, PLAN)
    assert job.created is not None and job.created.year == 2023
    assert JobSpec.from_json(job.spec_json).steps == 100
    assert await client.list() == (job,)


async def test_an_id_is_chosen_where_none_is_given(client: Client) -> None:
    first, second = await client.submit(SPEC), await client.submit(SPEC)
    assert first.id.startswith("job-") and first.id != second.id


async def test_another_spec_under_the_same_id_is_a_conflict(client: Client) -> None:
    await client.submit(SPEC, job_id="one")
    await client.submit(SPEC, job_id="one")
    with pytest.raises(errors.Conflict, match=r"job one is another \(choose another id\)"):
        await client.submit({**SPEC, "steps": 3}, job_id="one")


async def test_a_bad_spec_is_refused_before_it_is_sent(client: Client) -> None:
    with pytest.raises(errors.InvalidInput, match="stesp is unknown"):
        await client.submit({**SPEC, "stesp": 3})


async def test_an_unknown_job_is_not_found(client: Client) -> None:
    with pytest.raises(errors.NotFound, match="no job none"):
        await client.get("none")


async def test_a_watch_gives_typed_events_and_skips_what_it_does_not_know(client: Client) -> None:
    events = [event async for event in client.watch("one")]
    assert [event.kind for event in events] == ["state", "step", "news", "state"]
    step = events[1].value
    assert isinstance(step, StepReport) and step.tokens_per_second == 50
    assert events[2].value is None


async def test_a_watch_that_was_cut_goes_on_where_it_stopped(
    controller: tuple[ScriptedController, str], client: Client
) -> None:
    controller[0].cuts = True
    events = [event async for event in client.watch("one")]
    assert [event.revision for event in events] == ["1", "2", "3", "4"]
    assert controller[0].watches == ["", "1", "2", "3", "4"]


async def test_waiting_for_a_failed_job_raises_its_reason_and_log(
    controller: tuple[ScriptedController, str], client: Client
) -> None:
    handle = await client.submit(SPEC, job_id="one")
    assert (await handle.wait()).state is JobState.SUCCEEDED
    controller[0].jobs["one"].MergeFrom(
        pb.Job(error_reason="PROCESS_LOST", error_message="worker w died", error_log=["a", "b"])
    )
    controller[0].jobs["one"].state = pb.JOB_STATE_FAILED
    with pytest.raises(errors.JobFailed, match="job one failed: worker w died") as failed:
        (await handle.get()).check()
    assert failed.value.details["log"] == "a\nb"


async def test_cancelling_returns_the_ended_job(client: Client) -> None:
    handle = await client.submit(SPEC)
    assert (await handle.cancel()).state is JobState.CANCELLED


async def test_a_resumed_job_takes_a_plan_in_any_form(
    controller: tuple[ScriptedController, str], client: Client, tmp_path: Path
) -> None:
    handle = await client.submit(SPEC, job_id="one")
    with pytest.raises(errors.Conflict, match="still running"):
        await handle.resume()
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    for plan in (PLAN, json.loads(PLAN.to_json()), tmp_path / "plan.json", str(tmp_path / "plan.json")):
        await handle.cancel()
        job = await handle.resume(plan=plan, steps=9)
        assert (job.state, job.steps_done, job.checkpoint_step) == (JobState.PENDING, 1, 1)
    assert controller[0].resumed == [(PLAN.to_json(), 9)] * 4


async def test_samples_are_values_and_fields_of_later_versions_are_left_out(client: Client) -> None:
    best, *others = await client.samples("one")
    assert (best.step, best.position, best.reward, best.versions) == (1, 70, 1.0, (1, 1))
    assert best.rewards == {"exact_answer": 1.0, "format": 0.25}
    assert len(others) == 2
    assert await client.job("one").samples(step=1, limit=1) == (best,)
    with pytest.raises(errors.NotFound, match="no recorded samples of step 2"):
        await client.samples("one", step=2)


def test_a_step_report_keeps_every_number_that_was_sent() -> None:
    sent = {
        "step": 3,
        "reward_mean": 0.5,
        "tokens": 10,
        "seconds": {"total": 2.0},
        "rewards": {"format": 0.25},
        "value_loss": 0.125,
        "later": True,
        "name": "x",
    }
    report = JobEvent("1", datetime.now(UTC), "step", sent).value
    assert isinstance(report, StepReport)
    assert report.rewards == {"format": 0.25}
    assert report.metrics == {
        "step": 3,
        "reward_mean": 0.5,
        "tokens": 10,
        "seconds.total": 2.0,
        "rewards.format": 0.25,
        "value_loss": 0.125,
    }


async def test_a_controller_that_is_not_there_is_unavailable_and_says_what_to_run(tmp_path: Path) -> None:
    async with Client.connect("127.0.0.1:1", timeout=5) as client:
        with pytest.raises(errors.Unavailable, match="nereus up"):
            await client.list()
    with pytest.raises(errors.Unavailable, match="nereus up"):
        Client.connect(data_dir=tmp_path)


async def test_the_sync_face_does_the_same(controller: tuple[ScriptedController, str]) -> None:
    import asyncio

    def use() -> None:
        with SyncClient.connect(controller[1]) as client:
            job = client.submit(SPEC, job_id="one")
            assert [event.kind for event in job.watch()] == ["state", "step", "news", "state"]
            assert job.samples(limit=1)[0].position == 70
            assert job.cancel().state is JobState.CANCELLED
            assert job.resume(steps=9).state is JobState.PENDING
            assert job.wait().state is JobState.SUCCEEDED
            assert client.cluster_status().devices[0].units == ("u",)
            assert [known.id for known in client.list()] == ["one"]
            for _ in client.watch("one"):
                break
            assert job.cancel().state is JobState.CANCELLED

    await asyncio.to_thread(use)
