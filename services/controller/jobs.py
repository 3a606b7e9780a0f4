"""The jobs of this controller: accepted once, run side by side, ended by themselves or by their users."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus.spec import JobSpec
from nereus_common.core.errors import Conflict, InvalidInput, NotFound
from nereus_common.core.ids import JobId, check_name
from nereus_common.registry import JobEvent, JobRecord, JobState, Versioned

from .attempts import Start
from .checkpoints import newest
from .resuming import check_something_is_left, resumed_spec
from .runner import JobRunner
from .samples import read_samples
from .surroundings import Surroundings

log = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""How long a watcher waits for news before it looks whether the job has ended."""

ENDING_SECONDS = 10.0
"""What a job may take from the moment its record says that it has ended."""

_NOT_ENDED: Mapping[str, Any] = {
    "state": JobState.PENDING,
    "ended": None,
    "error_reason": "",
    "error_message": "",
    "error_log": (),
}


class Jobs:
    """`tasks` is the group the jobs run in; it belongs to the service and outlives every call."""

    def __init__(self, surroundings: Surroundings, tasks: asyncio.TaskGroup) -> None:
        self._around = surroundings
        self._tasks = tasks
        self._running: dict[JobId, asyncio.Task[None]] = {}

    async def recover(self) -> None:
        """Jobs that ran under an earlier life of this controller have lost their loop: each goes on or ends, by its
        own spec, beside the others."""
        for stored in await self._around.registry.jobs():
            record = stored.value
            if record.state.ended or record.id in self._running:
                continue
            log.warning("job %s was running when its controller ended", record.id)
            try:
                self._start(record.id, self._runner(record).recover())
            except InvalidInput as unreadable:  # an earlier release wrote its spec
                await self._around.journal(record.id).end(JobState.FAILED, unreadable)

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
        self._start(job, self._runner(record).run())
        return record

    async def resume(self, job: JobId, plan_json: str, steps: int) -> JobRecord:
        """Run an ended job on from its newest complete checkpoint; "" and 0 keep its plan and its number of steps.

        Conflict while it runs; NotFound without a checkpoint; InvalidInput names what is wrong with plan or steps.
        """
        stored = await self._ended(job)
        record = stored.value
        spec = resumed_spec(JobSpec.from_json(record.spec_json), plan_json, steps)
        start = await self._newest_checkpoint(job, spec)
        done = start.progress.step
        check_something_is_left(job, spec.steps, done, record.state is JobState.SUCCEEDED)
        resumed = replace(record, spec_json=spec.to_json(), fruitless=0, steps_done=done, **_NOT_ENDED)
        await self._around.registry.put_job(resumed, expected=stored.revision)
        self._start(job, self._runner(resumed).resume(start))
        return resumed

    async def get(self, job: JobId) -> JobRecord:
        return (await self._stored(job)).value

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

    async def samples(self, job: JobId, step: int, limit: int) -> Sequence[Mapping[str, Any]]:
        """Recorded samples of a step, best reward first; `samples.LAST`: of the last step that has any. NotFound."""
        await self.get(job)
        folder = self._around.folder(job) / "samples"
        return await asyncio.to_thread(read_samples, job, folder, step, limit)

    async def _stored(self, job: JobId) -> Versioned[JobRecord]:
        try:
            return await self._around.registry.get_job(job)
        except NotFound as missing:
            raise NotFound(f"there is no job {job}", remedy="`nereus job list` shows all", job=job) from missing

    async def _ended(self, job: JobId) -> Versioned[JobRecord]:
        """The record of a job that has ended; Conflict where it has not."""
        state = (await self.get(job)).state
        if not state.ended:
            raise Conflict(f"job {job} is still {state}", remedy=f"`nereus job cancel {job}` ends it", job=job)
        if job in self._running:  # its end is written down, and about to be told
            await asyncio.wait([self._running[job]], timeout=ENDING_SECONDS)
        return await self._stored(job)

    async def _newest_checkpoint(self, job: JobId, spec: JobSpec) -> Start:
        folder = self._around.checkpoints(job, spec)
        found = await asyncio.to_thread(newest, folder)
        if found is None:
            raise NotFound(
                f"job {job} has no complete checkpoint in {folder}",
                remedy="submit it again under another name; with checkpoint.every it can be resumed later",
                job=job,
            )
        return Start(checkpoint=found[0], progress=found[1])

    def _runner(self, record: JobRecord) -> JobRunner:
        return JobRunner(record.id, JobSpec.from_json(record.spec_json), self._around)

    def _start(self, job: JobId, life: Coroutine[Any, Any, None]) -> None:
        self._running[job] = self._tasks.create_task(self._live(job, life), name=f"job {job}")

    async def _live(self, job: JobId, life: Coroutine[Any, Any, None]) -> None:
        try:
            await life
        finally:
            self._running.pop(job, None)
