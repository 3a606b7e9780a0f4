"""A job's stream of events."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from nereus_common.core.errors import InvalidInput, ResourceExhausted, StaleEpoch
from nereus_common.core.ids import JobId
from nereus_common.registry import JobEvent, Registry

from .conftest import JOB, KEPT


async def append(registry: Registry, count: int) -> None:
    for number in range(count):
        await registry.append_event(JOB, "step", {"number": number}, time=float(number))


async def test_events_come_back_in_order_with_dense_revisions(registry: Registry, other: Registry) -> None:
    assert await registry.append_event(JOB, "state", {"state": "läuft"}, time=1.25) == 1
    assert await registry.append_event(JOB, "step", {"reward": [0.5, None]}, time=1e9 + 0.125) == 2
    events = await other.read_events(JOB)
    assert [(event.revision, event.kind, event.payload, event.time) for event in events] == [
        (1, "state", {"state": "läuft"}, 1.25),
        (2, "step", {"reward": [0.5, None]}, 1e9 + 0.125),
    ]


async def test_reading_resumes_after_a_revision_and_stops_at_the_limit(registry: Registry) -> None:
    await append(registry, 10)
    assert [event.revision for event in await registry.read_events(JOB, 3, limit=4)] == [4, 5, 6, 7]
    assert await registry.read_events(JOB, 10) == ()


async def test_streams_of_jobs_are_apart(registry: Registry) -> None:
    await append(registry, 2)
    assert await registry.append_event(JobId("job-2"), "log", {}, time=0.0) == 1


async def test_a_reader_who_waits_is_woken_by_the_next_event(registry: Registry, other: Registry) -> None:
    await append(registry, 1)
    reading = asyncio.create_task(other.read_events(JOB, 1, wait=30.0))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await registry.append_event(JOB, "step", {}, time=0.0)
    assert [event.revision for event in await asyncio.wait_for(reading, 10)] == [2]


async def test_a_reader_waits_no_longer_than_it_said(registry: Registry) -> None:
    began = time.monotonic()
    assert await registry.read_events(JOB, wait=0.3) == ()
    assert 0.25 <= time.monotonic() - began < 5


async def test_the_stream_is_bounded_and_keeps_the_newest(registry: Registry) -> None:
    await append(registry, KEPT + 20)
    events = await registry.read_events(JOB, limit=1000)
    assert [event.revision for event in events] == list(range(21, KEPT + 21))


async def test_a_reader_too_slow_is_told_what_it_missed_and_can_resume(registry: Registry) -> None:
    await append(registry, KEPT + 20)
    with pytest.raises(ResourceExhausted, match="events 6 to 20 of job job-1 are no longer kept") as gone:
        await registry.read_events(JOB, 5)
    resumed = await registry.read_events(JOB, int(gone.value.details["first"]) - 1)
    assert resumed[0].revision == 21


async def test_a_revision_ahead_of_the_stream_shows_that_it_went_back(registry: Registry) -> None:
    await append(registry, 2)
    with pytest.raises(StaleEpoch, match="events up to 2, the watcher knows 3"):
        await registry.read_events(JOB, 3, wait=5.0)


@pytest.mark.parametrize(("after", "limit"), [(-1, 1), (0, 0)])
async def test_a_reading_that_makes_no_sense_is_refused(registry: Registry, after: int, limit: int) -> None:
    with pytest.raises(InvalidInput):
        await registry.read_events(JOB, after, limit=limit)


async def test_what_is_not_json_is_refused_and_takes_no_revision(registry: Registry) -> None:
    for payload in ({"loss": math.nan}, {"loss": object()}):
        with pytest.raises(InvalidInput, match="payload of event 'step'"):
            await registry.append_event(JOB, "step", payload, time=0.0)
    assert await registry.append_event(JOB, "step", {}, time=0.0) == 1


async def test_a_watcher_sees_every_event_once_while_many_write(registry: Registry, other: Registry) -> None:
    async def write(number: int) -> None:
        for step in range(10):
            await registry.append_event(JOB, "step", {"writer": number, "step": step}, time=0.0)

    async def watch() -> list[JobEvent]:
        seen = []
        async for event in other.watch_events(JOB, quiet=30.0):
            seen.append(event)
            if len(seen) == 40:
                break
        return seen

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(write(number) for number in range(4)))
    seen = await asyncio.wait_for(watching, 30)
    assert [event.revision for event in seen] == list(range(1, 41))
    for writer in range(4):
        assert [e.payload["step"] for e in seen if e.payload["writer"] == writer] == list(range(10))


async def test_a_watch_ends_after_its_quiet_time(registry: Registry) -> None:
    await append(registry, 3)
    assert len([event async for event in registry.watch_events(JOB, quiet=0.2)]) == 3


async def test_a_watcher_that_is_cancelled_leaves_the_registry_usable(registry: Registry) -> None:
    readers = [asyncio.create_task(registry.read_events(JOB, wait=60.0)) for _ in range(5)]
    await asyncio.sleep(0.1)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert await registry.append_event(JOB, "step", {}, time=0.0) == 1
    assert len(await registry.read_events(JOB)) == 1
