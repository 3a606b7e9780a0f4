"""The same client without async: its event loop runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nereus.client import Client, PlanSource, TargetSource
from nereus.events import JobEvent
from nereus.spec import JobSpec
from nereus.transition import StateDigests, Transition
from nereus.types import ClusterStatus, Job, Sample

T = TypeVar("T")
Value = TypeVar("Value")


class LoopThread:
    """An event loop in a daemon thread, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nereus client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end; an interrupt in this thread cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncClient:
    """Use as `with SyncClient.connect() as client`; methods and errors are those of `Client`."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    @classmethod
    def connect(cls, target: str | None = None, *, data_dir: Path | None = None, timeout: float = 60.0) -> Self:
        loop = LoopThread()

        async def connect() -> Client:
            return Client.connect(target, data_dir=data_dir, timeout=timeout)

        try:
            return cls(loop.run(connect()), loop)
        except BaseException:
            loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def target(self) -> str:
        return self._client.target

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def submit(self, job: JobSpec | Mapping[str, Any] | Path | str, *, job_id: str | None = None) -> SyncJobHandle:
        return SyncJobHandle(self, self._loop.run(self._client.submit(job, job_id=job_id)).id)

    def get(self, job_id: str) -> Job:
        return self._loop.run(self._client.get(job_id))

    def list(self) -> tuple[Job, ...]:
        return self._loop.run(self._client.list())

    def cancel(self, job_id: str) -> Job:
        return self._loop.run(self._client.cancel(job_id))

    def resume(self, job_id: str, *, plan: PlanSource | None = None, steps: int | None = None) -> Job:
        return self._loop.run(self._client.resume(job_id, plan=plan, steps=steps))

    def samples(self, job_id: str, *, step: int | None = None, limit: int = 0) -> tuple[Sample, ...]:
        return self._loop.run(self._client.samples(job_id, step=step, limit=limit))

    def show_transition(self, job: str | JobSpec | Path, target: TargetSource) -> Transition:
        return self._loop.run(self._client.show_transition(job, target))

    def apply_transition(self, job_id: str, target: TargetSource, *, transition_id: str = "") -> Transition:
        return self._loop.run(self._client.apply_transition(job_id, target, transition_id=transition_id))

    def transition(self, job_id: str, transition_id: str) -> Transition:
        return self._loop.run(self._client.transition(job_id, transition_id))

    def transitions(self, job_id: str) -> tuple[Transition, ...]:
        return self._loop.run(self._client.transitions(job_id))

    def follow_transition(self, job_id: str, transition_id: str) -> Iterator[Transition]:
        yield from self._each(self._client.follow_transition(job_id, transition_id))

    def state_digest(self, job_id: str, model_stage: str) -> StateDigests:
        return self._loop.run(self._client.state_digest(job_id, model_stage))

    def cluster_status(self) -> ClusterStatus:
        return self._loop.run(self._client.cluster_status())

    def watch(self, job_id: str, *, after: str = "") -> Iterator[JobEvent]:
        yield from self._each(self._client.watch(job_id, after=after))

    def _each(self, values: AsyncIterator[Value]) -> Iterator[Value]:
        try:
            while (value := self._loop.run(_next(values))) is not None:
                yield value
        finally:
            self._loop.run(_close(values))

    def job(self, job_id: str) -> SyncJobHandle:
        return SyncJobHandle(self, job_id)


class SyncJobHandle:
    """A job and the client to ask about it."""

    def __init__(self, client: SyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def get(self) -> Job:
        return self._client.get(self.id)

    def watch(self, *, after: str = "") -> Iterator[JobEvent]:
        return self._client.watch(self.id, after=after)

    def cancel(self) -> Job:
        return self._client.cancel(self.id)

    def resume(self, *, plan: PlanSource | None = None, steps: int | None = None) -> Job:
        return self._client.resume(self.id, plan=plan, steps=steps)

    def samples(self, *, step: int | None = None, limit: int = 0) -> tuple[Sample, ...]:
        return self._client.samples(self.id, step=step, limit=limit)

    def show_transition(self, target: TargetSource) -> Transition:
        return self._client.show_transition(self.id, target)

    def apply_transition(self, target: TargetSource, *, transition_id: str = "") -> Transition:
        return self._client.apply_transition(self.id, target, transition_id=transition_id)

    def transition(self, transition_id: str) -> Transition:
        return self._client.transition(self.id, transition_id)

    def transitions(self) -> tuple[Transition, ...]:
        return self._client.transitions(self.id)

    def follow_transition(self, transition_id: str) -> Iterator[Transition]:
        return self._client.follow_transition(self.id, transition_id)

    def state_digest(self, model_stage: str) -> StateDigests:
        return self._client.state_digest(self.id, model_stage)

    def wait(self) -> Job:
        """Return the job when it has ended; JobFailed, with the reason and the end of a log, when it failed."""
        for _ in self.watch():
            pass
        return self.get().check()


async def _next(values: AsyncIterator[Value]) -> Value | None:
    return await anext(values, None)


async def _close(values: AsyncIterator[Value]) -> None:
    close = getattr(values, "aclose", None)
    if close is not None:
        await close()
