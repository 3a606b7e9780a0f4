"""A worker process and its body, as the service sees them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Coroutine, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from nereus_common.core.errors import DeadlineExceeded, ProcessLost
from nereus_common.observe import logs
from nereus_common.workers.channel import Channel, Frame, Kind
from nereus_common.workers.process import ChildProcess
from nereus_common.workers.templates import Template

STREAM_WINDOW = 32
"""Items of one stream that may be under way; the child's generator waits beyond that."""
T = TypeVar("T")
_DRAIN_SECONDS = 1.0
_SWEEP_SECONDS = 30.0


@dataclass(frozen=True)
class WorkerSpec:
    """`body` is "module:Class"; `config` its only argument, picklable; `env` is added to this process's environment.

    `preload`: modules that take long to import. The first worker of a service that names them waits for a process that
    imports them, and every further one is forked from it.
    """

    name: str
    body: str
    config: Any
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


class Worker:
    """Made by `start`, ended by `stop`; both in one event loop, whose thread must outlive the worker.

    `exited` gets the ProcessLost when the process ends unasked; it stays pending when it is stopped.
    """

    def __init__(self, spec: WorkerSpec, template: Template | None = None) -> None:
        self.spec = spec
        self.exited: asyncio.Future[ProcessLost] = asyncio.get_running_loop().create_future()
        self._child = ChildProcess(spec.name, spec.env, spec.log_path, template)
        self._channel = Channel(self._child.socket)
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Frame | ProcessLost]] = {}
        self._streams: dict[int, asyncio.Queue[Frame | ProcessLost]] = {}
        self._lost: ProcessLost | None = None
        self._stopping = False
        self._reading = asyncio.create_task(self._read(), name=f"{spec.name}: read")
        self._burial = asyncio.create_task(self._bury(), name=f"{spec.name}: bury")

    @classmethod
    async def start(cls, spec: WorkerSpec, *, timeout: float) -> Self:
        """Return once the body is constructed.

        Raises what its constructor raised, ProcessLost, or DeadlineExceeded after `timeout` seconds; nothing of the
        process is left then.
        """
        template = None
        if spec.preload:
            begun = asyncio.get_running_loop().time()
            template = await _template(spec, timeout)
            timeout = max(timeout - (asyncio.get_running_loop().time() - begun), 0.0)
        worker = cls(spec, template)
        try:
            await worker._request(Kind.BUILD, (spec.name, spec.body, spec.config), "its construction", timeout)
        except BaseException:
            await worker.stop(grace=0)
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._child.pid

    async def call(self, method: str, /, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Run a method of the body.

        Raises the NereusError it raised, WorkerError for any other exception, ProcessLost when the process ends,
        DeadlineExceeded after `timeout` seconds. A call given up is cancelled in the child: an async method gets
        CancelledError; a plain one is dropped if it has not begun, else it runs on and its result is dropped.
        What the caller's logs are about (`observe.logs`) is what the child's are about.
        """
        return await self._request(Kind.CALL, (method, args, kwargs, dict(logs.subject())), method, timeout)

    async def stream(self, method: str, /, *args: Any, timeout: float, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Iterate over an async generator of the body; `timeout` seconds bound the wait for each item.

        Raises as `call` does. Closing it (`contextlib.aclosing`) cancels the child's generator. The child runs at
        most STREAM_WINDOW items ahead of the consumer.
        """
        call = next(self._ids)
        arriving: asyncio.Queue[Frame | ProcessLost] = asyncio.Queue(STREAM_WINDOW + 2)
        self._streams[call] = arriving
        ended = False
        try:
            content = (method, args, kwargs, dict(logs.subject()), STREAM_WINDOW)
            await self._within(self._send(Frame.of(Kind.STREAM, call, content)), method, timeout)
            for taken in itertools.count(1):
                frame = await self._next_item(arriving, method, timeout)
                ended = frame.kind is not Kind.ITEM
                if frame.kind is Kind.END:
                    return
                item = _value(frame)
                if taken % (STREAM_WINDOW // 2) == 0:
                    self._channel.post(Frame.of(Kind.CREDIT, call, STREAM_WINDOW // 2))
                yield item
        finally:
            self._streams.pop(call)
            if not ended and self._lost is None:
                self._channel.post(Frame(Kind.CANCEL, call))

    async def stop(self, grace: float = 5.0) -> None:
        """Ask the body to close, wait `grace` seconds, then kill; return when nothing of it is left.

        Pending calls get ProcessLost. May be called again, and after the process was lost.
        """
        self._stopping = True
        if grace > 0 and self._lost is None:
            asking = self._channel.post(Frame(Kind.STOP, 0))
            await asyncio.wait([self._burial, asking], timeout=grace, return_when=asyncio.ALL_COMPLETED)
        self._child.kill_group()
        await asyncio.shield(self._burial)

    async def _request(self, kind: Kind, content: tuple[Any, ...], what: str, timeout: float) -> Any:
        if self._lost is not None:
            raise copy(self._lost)
        call = next(self._ids)
        answer: asyncio.Future[Frame | ProcessLost] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer

        async def ask() -> Any:
            await self._send(Frame.of(kind, call, content))
            return _value(_frame(await answer))

        try:
            return await self._within(ask(), what, timeout)
        finally:
            self._calls.pop(call)
            if self._lost is None and (not answer.done() or answer.cancelled()):
                self._channel.post(Frame(Kind.CANCEL, call))

    async def _next_item(self, arriving: asyncio.Queue[Frame | ProcessLost], method: str, timeout: float) -> Frame:
        if self._lost is not None and arriving.empty():
            raise copy(self._lost)
        return _frame(await self._within(arriving.get(), method, timeout))

    async def _within(self, work: Coroutine[Any, Any, T], what: str, timeout: float) -> T:
        try:
            async with asyncio.timeout(timeout):
                return await work
        except TimeoutError:
            raise self._late(what, timeout) from None

    def _late(self, what: str, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"worker {self.spec.name} (pid {self.pid}) did not finish {what} within {timeout:g} s",
            remedy=f"its log is {self.spec.log_path}",
            process=self.spec.name,
            method=what,
            log="\n".join(self._child.log_tail()),
        )

    async def _send(self, frame: Frame) -> None:
        try:
            await self._channel.send(frame)
        except OSError:
            return  # the child is gone or going: every pending call hears of it from `_bury`

    async def _read(self) -> None:
        try:
            while (frame := await self._channel.receive()) is not None:
                self._deliver(frame)
        finally:
            # a child that is no longer heard, or closed its socket, serves nobody
            self._child.kill_group()

    def _deliver(self, frame: Frame) -> None:
        answer, arriving = self._calls.get(frame.call), self._streams.get(frame.call)
        if answer is not None and not answer.done():
            answer.set_result(frame)
        elif arriving is not None:
            arriving.put_nowait(frame)

    async def _bury(self) -> None:
        """Wait for the process to end, tell whoever waits for it, and have the rest of its family swept."""
        await self._child.ended
        # answers sent before the end still count; a forked grandchild may keep the socket open for ever
        await asyncio.wait([self._reading], timeout=_DRAIN_SECONDS)
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._lost = self._child.lost("after it was told to stop" if self._stopping else "unasked")
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(self._lost)
        for arriving in self._streams.values():
            arriving.put_nowait(self._lost)
        if not self._stopping:
            self.exited.set_result(self._lost)
        await self._channel.close()
        await self._child.sweep(_SWEEP_SECONDS)
        if not self._reading.cancelled():
            self._reading.result()  # a fault of the reader itself is a bug, and is raised by `stop`


async def _template(spec: WorkerSpec, timeout: float) -> Template | None:
    log_path = spec.log_path.with_name(f"template.{spec.preload[0]}.log")
    try:
        async with asyncio.timeout(timeout):
            return await Template.of(spec.preload, spec.env, log_path)
    except TimeoutError:
        raise DeadlineExceeded(
            f"worker {spec.name}: {', '.join(spec.preload)} were not imported within {timeout:g} s",
            remedy=f"the log is {log_path}",
            process=spec.name,
        ) from None


def _frame(came: Frame | ProcessLost) -> Frame:
    if isinstance(came, ProcessLost):
        raise copy(came)  # the same loss is raised to many: each gets a traceback of its own
    return came


def _value(frame: Frame) -> Any:
    """The content of an answer, or the error it carries, raised."""
    value = frame.value()
    if frame.kind is Kind.FAILED:
        raise value
    return value
