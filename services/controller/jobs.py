"""The jobs of this controller: accepted once, run side by side, ended by themselves or by their users."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from nereus.spec import JobSpec
from nereus_common.core.errors import Conflict, NereusError, NotFound
from nereus_common.core.ids import JobId, check_name
from nereus_common.registry import JobEvent, JobRecord, JobState

from .runner import JobRunner, Surroundings

log = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""How long a watcher waits for news before it looks whether the job has ended."""


class Jobs:
    """`tasks` is the group the jobs run in; it belongs to the service and outlives every call."""

    def __init__(self, surroundings: Surroundings, tasks: asyncio.TaskGroup) -> None:
        self._around = surroundings
        self._tasks = tasks
        self._running: dict[JobId, asyncio.Task[None]] = {}

    async def recover(self) -> None:
        """Jobs that ran under an earlier life of this controller have lost their loop: say so in their records."""
        for stored in await self._around.registry.jobs():
            if not stored.value.state.ended:
                log.warning("job %s was running when its controller ended", stored.value.id)
                failed = replace(
                    stored.value,
                    state=JobState.FAILED,
                    ended=self._around.clock(),
                    error_reason=NereusError.reason,
                    error_message="the controller that ran this job ended (submit it again under another name)",
                )
                await self._around.registry.put_job(failed, expected=stored.revision)

    async def submit(self, job: JobId, spec_json: str) -> JobRecord:
        """Idempotent: the same spec under the same name is the same job. InvalidInput names the field; Conflict."""
        check_name(job, "job_id")
        spec = JobSpec.from_json(spec_json)
        record = JobRecord(job, spec.to_json(), created=self._around.clock())
        try:
            await self._around.registry.put_job(record, expected=0)
        except Conflict:
            known = await self.get(job)
            if known.spec_json != record.spec_json:
                raise Conflict(f"job {job} exists with another spec", remedy="choose another name", job=job) from None
            return known
        runner = JobRunner(job, spec, self._around)
        task = self._tasks.create_task(self._run(job, runner), name=f"job {job}")
        self._running[job] = task
        return record

    async def get(self, job: JobId) -> JobRecord:
        try:
            return (await self._around.registry.get_job(job)).value
        except NotFound as missing:
            raise NotFound(f"there is no job {job}", remedy="`nereus job list` shows all", job=job) from missing

    async def list(self) -> tuple[JobRecord, ...]:
        return tuple(stored.value for stored in await self._around.registry.jobs())

    async def cancel(self, job: JobId) -> JobRecord:
        """Returns when the job has ended; an ended job stays as it is."""
        task = self._running.get(job)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return await self.get(job)

    async def watch(self, job: JobId, after: int) -> AsyncIterator[JobEvent]:
        """Events after a revision, then new ones, until the job has ended and all are told."""
        await self.get(job)
        while True:
            ended = (await self.get(job)).state.ended
            events = await self._around.registry.read_events(job, after, wait=0.0 if ended else QUIET_SECONDS)
            for event in events:
                after = event.revision
                yield event
            if ended and not events:
                return

    async def close(self) -> None:
        """Cancel what runs; each job still releases its units."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _run(self, job: JobId, runner: JobRunner) -> None:
        try:
            await runner.run()
        finally:
            self._running.pop(job, None)
