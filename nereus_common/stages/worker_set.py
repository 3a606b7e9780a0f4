"""The worker processes of one unit: started together, called together, and ended together when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from nereus_common.core.errors import IllegalTransition, ProcessLost
from nereus_common.workers import Worker, WorkerSpec


class WorkerSet:
    """One worker per entry of `specs`. `on_lost` is called once, with the first process that ended unasked."""

    def __init__(self, specs: Sequence[WorkerSpec], on_lost: Callable[[ProcessLost], None]) -> None:
        self._specs = tuple(specs)
        self._on_lost = on_lost
        self._workers: list[Worker] = []
        self._stopped = False

    @property
    def specs(self) -> Sequence[WorkerSpec]:
        return self._specs

    @property
    def pids(self) -> Sequence[int]:
        return [worker.pid for worker in self._workers]

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers)

    async def start(self, timeout: float) -> None:
        """Start all; when one fails, none is left."""
        starts = [asyncio.create_task(Worker.start(spec, timeout=timeout)) for spec in self._specs]
        try:
            self._workers = list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            begun = await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(worker.stop(0.0) for worker in begun if isinstance(worker, Worker)))
            raise
        if self._stopped:
            await self.stop()
            raise IllegalTransition("the unit was released while it started")
        for worker in self._workers:
            worker.exited.add_done_callback(self._note_exit)

    async def call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Call `method` on every worker, rank r with arguments[r]; the first failure is raised at once.

        A rank may be left inside a collective that its dead neighbour never enters: so a lost process ends the set.
        """
        calls = [
            asyncio.create_task(worker.call(method, *given, timeout=timeout))
            for worker, given in zip(self._workers, arguments, strict=True)
        ]
        try:
            return list(await asyncio.gather(*calls))
        except BaseException as error:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            if isinstance(error, ProcessLost):
                await self.stop()
            raise

    async def call_each(self, method: str, *given: Any, timeout: float) -> list[Any]:
        """Call `method` on every worker with the same arguments."""
        return await self.call_all(method, [given] * len(self._workers), timeout)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    def _note_exit(self, exited: asyncio.Future[ProcessLost]) -> None:
        if not self._stopped and not exited.cancelled():
            self._on_lost(exited.result())
