"""What is written down about a job: its record, its events as a stream and in its folder, and its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus_common.core.errors import NereusError
from nereus_common.core.ids import JobId
from nereus_common.observe.metrics import MetricSinks
from nereus_common.registry import JobRecord, JobState, Registry

from .attempts import Start

Change = Callable[[JobRecord], JobRecord]


class JobJournal:
    """The only writer of a job's record while the job lives; its calls may overlap.

    `clock` gives seconds since the Unix epoch.
    """

    def __init__(self, job: JobId, folder: Path, registry: Registry, clock: Callable[[], float]) -> None:
        self._job = job
        self._folder = folder
        self._registry = registry
        self._clock = clock
        self._writing = asyncio.Lock()
        self._sinks: MetricSinks | None = None

    @asynccontextmanager
    async def measuring(self, sinks: MetricSinks) -> AsyncIterator[None]:
        """While the block runs, events are metrics too; then `sinks` is closed."""
        self._sinks = sinks
        try:
            yield
        finally:
            async with self._writing:
                self._sinks = None
                await asyncio.to_thread(sinks.close)

    async def record(self) -> JobRecord:
        return (await self._registry.get_job(self._job)).value

    async def emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Tell an event: as a line to events.jsonl in the job's folder, and to its stream."""
        async with self._writing:
            await self._emit(kind, payload)

    async def set_state(self, state: JobState, **more: Any) -> None:
        async with self._writing:
            await self._update(lambda record: replace(record, state=state, folder=str(self._folder)))
            await self._emit("state", {"state": str(state), **more})

    async def begin_attempt(self, start: Start, *, fruitless: bool) -> int:
        """Count an attempt, as `fruitless` until it writes a checkpoint; return its number, from 1."""
        step = start.progress.step
        async with self._writing:
            begun = await self._update(
                lambda record: replace(
                    record,
                    attempts=record.attempts + 1,
                    fruitless=record.fruitless + fruitless,
                    steps_done=step,
                    checkpoint_step=record.checkpoint_step if start.copies else step if start.checkpoint else 0,
                )
            )
        return begun.attempts

    async def restarting(self, attempt: int, step: int, why: NereusError | None) -> None:
        """Tell that an attempt after the first begins; `why` is None where the job's user asked for it."""
        told = {"reason": why.reason, "message": str(why)} if why else {"reason": "RESUMED"}
        await self.emit("restart", {"attempt": attempt, "from_step": step, **told})

    async def end(self, state: JobState, error: NereusError | None = None) -> None:
        lines = tuple(error.details.get("log", "").splitlines()) if error else ()
        told = {"error_reason": error.reason, "error_message": str(error), "error_log": list(lines)} if error else {}
        async with self._writing:
            await self._update(
                lambda record: replace(
                    record,
                    state=state,
                    ended=self._clock(),
                    folder=str(self._folder),
                    error_reason=error.reason if error else "",
                    error_message=str(error) if error else "",
                    error_log=lines,
                )
            )
            await self._emit("state", {"state": str(state), **told})

    async def _emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        change = _CHANGES.get(kind)
        if change is not None:
            await self._update(lambda record: change(record, payload))
        now = self._clock()
        line = json.dumps({"time": now, "kind": kind, **payload})
        await asyncio.to_thread(_append, self._folder / "events.jsonl", line)  # whoever hears of it finds it there
        if self._sinks is not None:
            await asyncio.to_thread(self._sinks.event, kind, payload, now)
        await self._registry.append_event(self._job, kind, payload, time=now)

    async def _update(self, change: Change) -> JobRecord:
        stored = await self._registry.get_job(self._job)
        changed = change(stored.value)
        await self._registry.put_job(changed, expected=stored.revision)
        return changed


def _after_step(record: JobRecord, payload: Mapping[str, Any]) -> JobRecord:
    return replace(record, steps_done=int(payload["step"]) + 1)


def _after_checkpoint(record: JobRecord, payload: Mapping[str, Any]) -> JobRecord:
    return replace(record, checkpoint_step=int(payload["step"]), fruitless=0)


_CHANGES: Mapping[str, Callable[[JobRecord, Mapping[str, Any]], JobRecord]] = {
    "step": _after_step,
    "checkpoint": _after_checkpoint,
}
"""What an event says that the record has to say too."""


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")
