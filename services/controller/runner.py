"""One job from its submission to its end, as a sequence of attempts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nereus.spec import JobSpec
from nereus_common.core.errors import NereusError, NotFound, ProcessLost
from nereus_common.core.ids import JobId
from nereus_common.core.plan import Plan
from nereus_common.observe.metrics import MetricSinks, open_sinks
from nereus_common.registry import JobState

from .attempt import Attempt, find_coordinator
from .attempts import GiveUp, Standing, Start, after_failure
from .checkpoints import newest
from .gone import explained
from .progress import Progress
from .surroundings import Surroundings

log = logging.getLogger(__name__)

STARTING_SECONDS = 30.0
"""How long a job that somebody has just asked for waits for services that start. One that restarts by itself waits as
long as a placement may take: whoever mends the cluster needs time."""


class JobRunner:
    """Runs one job, once: by `run`, `resume` or `recover`. The registry's record is the truth."""

    def __init__(self, job: JobId, spec: JobSpec, around: Surroundings) -> None:
        self._job = job
        self._spec = spec
        self._around = around
        self._journal = around.journal(job)

    async def run(self) -> None:
        """From the beginning. As the other two it returns when the job has ended, however; only a bug raises."""
        await self._to_the_end(partial(self._attempts, Start(), None))

    async def resume(self, start: Start) -> None:
        """On from a checkpoint, because its user says so."""
        await self._to_the_end(partial(self._attempts, start, None))

    async def recover(self) -> None:
        """After an earlier life of this controller ended while the job was running."""
        await self._to_the_end(self._recover)

    async def _to_the_end(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._journal.measuring(await asyncio.to_thread(self._sinks)):
                await work()
        except asyncio.CancelledError:
            await asyncio.shield(self._journal.end(JobState.CANCELLED))
            raise
        except NereusError as error:
            log.warning("job %s failed: %s", self._job, error)
            await self._journal.end(JobState.FAILED, error)
        except Exception as bug:
            log.exception("job %s failed by a fault of ours", self._job)
            await self._journal.end(JobState.FAILED, NereusError(f"{type(bug).__name__}: {bug}"))
        else:
            await self._journal.end(JobState.SUCCEEDED)

    def _sinks(self) -> MetricSinks:
        around = self._around
        return open_sinks(
            self._spec.metrics,
            around.folder(self._job),
            self._job,
            time=around.clock(),
            series=around.series,
            config=self._spec.model_dump(mode="json"),
        )

    async def _recover(self) -> None:
        lost = ProcessLost("the controller that ran this job ended", process="controller")
        try:
            start = await self._next_start(lost)
        except NereusError:
            await self._release_what_is_left()
            raise
        await self._attempts(start, lost)

    async def _attempts(self, start: Start, why: NereusError | None) -> None:
        """Attempt after attempt, until one ends well or the next is not worth it."""
        fruitless = why is not None
        while True:
            await self._begin(start, why, fruitless=fruitless)
            patience = self._spec.deadlines.place if why else STARTING_SECONDS
            plan = await self._plan_in_force() if why else None
            attempt = Attempt(self._job, self._spec, self._around, self._journal, start, patience, plan)
            try:
                await attempt.run()
            except NereusError as error:
                why = await explained(error, self._job, self._around.registry)
                log.warning("job %s: an attempt failed: %s", self._job, why)
            else:
                return
            before, start = start, await self._next_start_or_release(why, start, attempt.copies)
            fruitless = not start.copies or start.progress == before.progress

    async def _next_start_or_release(self, why: NereusError, last: Start, copies: Progress | None) -> Start:
        """Copies are left for a next attempt, by the last one or, where that did not get to them, by the one before:
        where there is no next attempt, nothing may be left."""
        try:
            return await self._next_start(why, copies)
        except BaseException:
            if last.copies or copies is not None:
                await asyncio.shield(self._release_what_is_left())
            raise

    async def _plan_in_force(self) -> Plan | None:
        """The one that a job which restarts by itself goes on with; None when it was never placed."""
        try:
            return (await self._around.registry.get_plan(self._job)).plan
        except NotFound:
            return None

    async def _begin(self, start: Start, why: NereusError | None, *, fruitless: bool) -> None:
        attempt = await self._journal.begin_attempt(start, fruitless=fruitless)
        if attempt > 1:
            await self._journal.restarting(attempt, start.progress.step, why)

    async def _next_start(self, error: NereusError, copies: Progress | None = None) -> Start:
        """Where to go on after `error`; raises it, with what can be done about it, where nowhere."""
        record = await self._journal.record()
        found = await asyncio.to_thread(newest, self._around.checkpoints(self._job, self._spec))
        last = None if found is None else Start(checkpoint=found[0], progress=found[1])
        standing = Standing(self._job, record.steps_done, record.fruitless, last, copies)
        match after_failure(error, self._spec.checkpoint, standing):
            case Start() as start:
                return start
            case GiveUp(remedy):
                raise _with_remedy(error, remedy) from error

    async def _release_what_is_left(self) -> None:
        try:
            coordinator = await find_coordinator(self._around, self._journal, None, STARTING_SECONDS)
            await coordinator.release(self._job, self._spec.deadlines.release)
        except NereusError as error:
            log.error("job %s: what an earlier controller placed was not released: %s", self._job, error)


def _with_remedy(error: NereusError, remedy: str) -> NereusError:
    if not remedy:
        return error
    details: dict[str, Any] = dict(error.details)
    both = "; ".join(filter(None, (error.remedy, remedy)))
    return type(error)(error.message, remedy=both, **details)
