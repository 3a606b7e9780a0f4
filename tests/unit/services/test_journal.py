"""What is written about a job is consistent, also when two write at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nereus_controller.attempts import Start
from nereus_controller.journal import JobJournal
from nereus_controller.progress import Progress

from nereus_common.core.errors import ProcessLost
from nereus_common.core.ids import JobId
from nereus_common.registry import JobRecord, JobState, Registry
from nereus_common.registry.memory import MemoryRegistry

pytestmark = pytest.mark.fast
JOB = JobId("j")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with MemoryRegistry() as made:
        await made.put_job(JobRecord(JOB, "{}", 1.0), expected=0)
        yield made


@pytest.fixture
def journal(registry: Registry, tmp_path: Path) -> JobJournal:
    return JobJournal(JOB, tmp_path / "j", registry, lambda: 7.0)


async def test_a_step_and_a_checkpoint_told_at_once_are_both_in_the_record(
    journal: JobJournal, registry: Registry, tmp_path: Path
) -> None:
    await asyncio.gather(journal.emit("step", {"step": 2}), journal.emit("checkpoint", {"step": 2, "bytes": 8}))
    record = await journal.record()
    assert (record.steps_done, record.checkpoint_step) == (3, 2)
    told = [event.kind for event in await registry.read_events(JOB)]
    kept = [json.loads(line)["kind"] for line in (tmp_path / "j" / "events.jsonl").read_text().splitlines()]
    assert told == kept and sorted(told) == ["checkpoint", "step"]


async def test_attempts_are_counted_and_a_checkpoint_makes_them_fruitful(journal: JobJournal) -> None:
    saved = Start(Progress(4, 8), Path("/c/step-00000004"))
    assert [await journal.begin_attempt(saved, fruitless=again) for again in (False, True, True)] == [1, 2, 3]
    record = await journal.record()
    assert (record.attempts, record.fruitless, record.steps_done, record.checkpoint_step) == (3, 2, 4, 4)
    await journal.emit("checkpoint", {"step": 6})
    assert (await journal.record()).fruitless == 0


async def test_an_end_is_told_with_its_reason_and_the_end_of_the_log(journal: JobJournal, registry: Registry) -> None:
    await journal.end(JobState.FAILED, ProcessLost("worker w died", remedy="see its log", log="a\nb"))
    record = await journal.record()
    assert (record.state, record.ended, record.error_reason) == (JobState.FAILED, 7.0, "PROCESS_LOST")
    assert (record.error_message, record.error_log) == ("worker w died (see its log)", ("a", "b"))
    (event,) = await registry.read_events(JOB)
    assert event.payload["error_log"] == ["a", "b"]
