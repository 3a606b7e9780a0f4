"""A caller that is cancelled stays cancelled, wherever in an exchange that finds it: one that went on would do the next
thing, and wait for it, after the rest of its job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nereus_common.registry import JobRecord, Registry, open_registry

from .conftest import JOB, serving, valkey_binary

MOMENTS = 40
"""Turns of the loop after which a call is cancelled, from 0; an exchange with a server takes fewer."""
TRIES = 3
Call = Callable[[Registry], Awaitable[object]]


async def _written(registry: Registry) -> None:
    await registry.append_event(JOB, "log", {}, time=0.0)


async def _read(registry: Registry) -> None:
    await registry.get_job(JOB)


async def _awaited(registry: Registry) -> None:
    """An event that comes while it is awaited."""
    last = len(await registry.read_events(JOB))
    reading = asyncio.ensure_future(_written(registry))
    try:
        await registry.read_events(JOB, last, wait=5.0)
    finally:
        await asyncio.wait([reading])


async def _outlives(call: Call, registry: Registry, turns: int) -> bool:
    """Whether a task that was cancelled so many turns into `call` went on after it."""
    parked = asyncio.Event()

    async def work() -> None:
        await call(registry)
        parked.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    was_over = parked.is_set()
    task.cancel()
    going_on = asyncio.create_task(parked.wait())
    await asyncio.wait([task, going_on], return_when=asyncio.FIRST_COMPLETED)
    lost = parked.is_set() and not was_over
    for one in (task, going_on):
        one.cancel()
    await asyncio.wait([task, going_on])
    return lost


async def _lost(call: Call, registry: Registry) -> list[int]:
    """The moments at which a cancellation was lost."""
    await registry.put_job(JobRecord(JOB, "{}", 1.0), expected=0)
    return [turns for turns in range(MOMENTS) for _ in range(TRIES) if await _outlives(call, registry, turns)]


@pytest.mark.parametrize("call", [_written, _read, _awaited])
async def test_a_cancellation_is_never_lost_in_a_call(registry: Registry, call: Call) -> None:
    assert await _lost(call, registry) == []


async def test_nor_where_the_url_has_a_timeout_for_the_client_library(tmp_path: Path) -> None:
    with serving(valkey_binary(), tmp_path) as url:
        async with await open_registry(f"{url}?socket_timeout=5") as registry:
            assert await _lost(_written, registry) == []
