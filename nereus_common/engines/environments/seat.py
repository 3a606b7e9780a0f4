"""One worker process and the episodes that live in it.

Its calls take turns, so that each call's time limit is its own. A call that hangs, ends the process or fills its memory
takes the process down; its episodes end with it, and the next one to be opened gets a new process.
"""

from __future__ import annotations

import asyncio
from typing import Any

from nereus_common.core.errors import JobFailed
from nereus_common.engines.strangers import Blame, ask, fatal
from nereus_common.rl.environments import Observation, Task
from nereus_common.workers import Worker, WorkerSpec

START_SECONDS = 60.0
"""For a process that replaces another; its code has been loaded before."""


class Seat:
    """`timeout` in seconds, for one call."""

    def __init__(self, spec: WorkerSpec, timeout: float) -> None:
        self.episodes: set[int] = set()
        self._spec = spec
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._worker: Worker | None = None
        self._over: list[int] = []
        self._unanswered: Blame | None = None
        self._fall: JobFailed | None = None
        self._closed = False

    async def start(self, timeout: float) -> None:
        """Have a process; InvalidInput when the environment cannot be found. May be called again."""
        async with self._turn:
            await self._process(timeout)

    async def open(self, episode: int, task: Task, blame: Blame) -> Worker:
        """Begin an episode, in a new process if need be; gives the process it lives in, for `step`."""
        self.episodes.add(episode)
        async with self._turn:
            if self._closed:
                raise self._lost(blame)
            worker = await self._process(START_SECONDS)
            await self._call(worker, "open", episode, task, blame)
            return worker

    async def step(self, home: Worker, episode: int, response: str, blame: Blame) -> Observation:
        """JobFailed is all that a fault gives; also when the process was lost to the fault of another episode."""
        async with self._turn:
            if self._worker is not home:
                raise self._lost(blame)
            observation: Observation = await self._call(home, "step", episode, response, blame)
            return observation

    def leave(self, episode: int) -> None:
        """The episode is over; the process hears of it with its next call."""
        self.episodes.discard(episode)
        self._over.append(episode)

    async def close(self) -> None:
        """End the process, at once and for good; a call under way fails, and so do those that wait."""
        self._closed = True
        await self._stop()
        async with self._turn:  # a process may just have been starting
            await self._stop()

    async def _process(self, timeout: float) -> Worker:
        if self._worker is not None and self._worker.exited.done():
            await self._stop()  # it ended between two calls: that is no fault of the episode that begins now
        if self._worker is None:
            self._worker = await Worker.start(self._spec, timeout=timeout)
            self._fall = None
        return self._worker

    async def _stop(self) -> None:
        worker, self._worker, self._over, self._unanswered = self._worker, None, [], None
        if worker is not None:
            await worker.stop(grace=0)

    async def _call(self, worker: Worker, method: str, episode: int, content: Any, blame: Blame) -> Any:
        try:
            await self._settled(worker)
            over = tuple(self._over)
            answer = await self._ask(worker, method, episode, content, over, blame=blame)
        except JobFailed as failure:
            if fatal(failure):
                self._fall = failure
                await self._stop()
            raise
        del self._over[: len(over)]
        return answer

    async def _settled(self, worker: Worker) -> None:
        """Wait, within its limit, for a call whose caller went away: its time must not count against the next."""
        if self._unanswered is not None:
            await ask(worker, "settle", timeout=self._timeout, blame=self._unanswered)
            self._unanswered = None

    async def _ask(self, worker: Worker, method: str, *args: Any, blame: Blame) -> Any:
        try:
            return await ask(worker, method, *args, timeout=self._timeout, blame=blame)
        except asyncio.CancelledError:
            self._unanswered = blame
            raise

    def _lost(self, blame: Blame) -> JobFailed:
        fall = self._fall
        log = fall.details.get("log", "") if fall else ""
        return JobFailed(
            f"{blame.who} lost its process, {blame.where}: {fall.message if fall else 'it was closed'}",
            remedy=blame.remedy,
            **{**blame.details, "log": log},
        )
