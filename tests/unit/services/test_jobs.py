"""What may be resumed, and what becomes of jobs of an earlier life that nobody can run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nereus_controller.jobs import Jobs
from nereus_controller.surroundings import Surroundings

from nereus.spec import JobSpec
from nereus_common.core.errors import Conflict, NotFound
from nereus_common.core.ids import JobId
from nereus_common.registry import JobRecord, JobState, Registry
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rpc.pool import Channels

pytestmark = pytest.mark.fast
JOB = JobId("j")
SPEC = JobSpec.from_dict({"model": "/m", "prompts": {"task": "gcd"}, "rewards": ["exact_answer"]})


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with MemoryRegistry() as made:
        yield made


@pytest.fixture
async def jobs(registry: Registry, tmp_path: Path) -> AsyncIterator[Jobs]:
    async with Channels() as channels, asyncio.TaskGroup() as tasks:
        yield Jobs(Surroundings(registry, channels, tmp_path, clock=lambda: 7.0), tasks)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.PLACING, JobState.RUNNING])
async def test_a_job_that_has_not_ended_is_not_resumed(jobs: Jobs, registry: Registry, state: JobState) -> None:
    await registry.put_job(JobRecord(JOB, SPEC.to_json(), 1.0, state), expected=0)
    with pytest.raises(Conflict, match=f"still {state} .*nereus job cancel j"):
        await jobs.resume(JOB, "", 0)


async def test_a_job_without_a_checkpoint_stays_as_it_ended(jobs: Jobs, registry: Registry, tmp_path: Path) -> None:
    ended = JobRecord(JOB, SPEC.to_json(), 1.0, JobState.FAILED, error_message="why", ended=2.0)
    await registry.put_job(ended, expected=0)
    (tmp_path / "j" / "checkpoints" / "step-00000004.partial").mkdir(parents=True)
    with pytest.raises(NotFound, match=r"no complete checkpoint in .*j/checkpoints"):
        await jobs.resume(JOB, "", 0)
    assert await jobs.get(JOB) == ended


async def test_checkpoints_are_looked_for_where_the_job_put_them(
    jobs: Jobs, registry: Registry, tmp_path: Path
) -> None:
    spec = SPEC.model_copy(update={"checkpoint": SPEC.checkpoint.model_copy(update={"folder": tmp_path / "elsewhere"})})
    await registry.put_job(JobRecord(JOB, spec.to_json(), 1.0, JobState.FAILED), expected=0)
    with pytest.raises(NotFound, match=r"no complete checkpoint in .*elsewhere/j"):
        await jobs.resume(JOB, "", 0)


async def test_an_unknown_job_is_not_found(jobs: Jobs) -> None:
    with pytest.raises(NotFound, match="no job j"):
        await jobs.resume(JOB, "", 0)
    with pytest.raises(NotFound, match="no job j"):
        await jobs.samples(JOB, -1, 0)


async def test_a_job_whose_spec_nobody_understands_any_more_fails_alone(jobs: Jobs, registry: Registry) -> None:
    await registry.put_job(JobRecord(JOB, '{"setps": 1}', 1.0, JobState.RUNNING), expected=0)
    await jobs.recover()
    record = await jobs.get(JOB)
    assert (record.state, record.error_reason, record.ended) == (JobState.FAILED, "INVALID_INPUT", 7.0)
