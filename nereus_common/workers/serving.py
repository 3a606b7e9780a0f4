"""Inside a worker process: one body, its main lane and its io lane.

The io thread owns the socket and the event loop, and runs async methods. The main thread runs plain methods one at
a time, in the order of their calls: engines may rely on always being on the thread that built them.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from nereus_common.core.errors import InvalidInput, NereusError
from nereus_common.observe import logs
from nereus_common.workers.channel import Channel, Frame, Kind
from nereus_common.workers.errors import WorkerError


@dataclass(frozen=True, slots=True)
class Job:
    """A call for the main lane."""

    call: int
    what: str
    run: Callable[[], Any]


def serve(descriptor: int) -> int:
    """Serve the parent at the other end of the socket until it says stop; the process's exit status."""
    os.set_inheritable(descriptor, False)
    lanes = Lanes(socket.socket(fileno=descriptor))
    threading.Thread(target=lanes.run_io, name="io", daemon=True).start()
    return lanes.run_main()


class Lanes:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._credits: dict[int, asyncio.Semaphore] = {}
        self._body: Any = None
        self._name = "worker"

    # main lane

    def run_main(self) -> int:
        while (job := self._jobs.get()) is not None:
            if job.call in self._waiting:  # else it was cancelled before its turn
                self._waiting.discard(job.call)
                self._run(job)
        close = getattr(self._body, "close", None)
        if close is not None:
            close()
        return 0

    def _run(self, job: Job) -> None:
        try:
            answer = self._frame(Kind.VALUE, job.call, job.what, job.run())
        except Exception as error:
            answer = self._failure(job.call, job.what, error)
        asyncio.run_coroutine_threadsafe(self._channel.send(answer), self._loop).result()

    def _build(self, name: str, body: str, config: Any) -> None:
        self._name = name
        # for the people who read the last lines of it when the process is lost
        logs.configure(name, readable=True)
        module, _, attribute = body.partition(":")
        self._body = getattr(importlib.import_module(module), attribute)(config)

    # io lane

    def run_io(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            # without its parent, or without this thread, the process is of no use to anyone
            sys.stderr.flush()
            os._exit(1)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(self._sock)
        while (frame := await self._channel.receive()) is not None:
            try:
                self._accept(frame)
            except Exception as error:  # the call's content cannot be read, or names nothing
                await self._channel.send(self._failure(frame.call, frame.kind.name.lower(), error))

    def _accept(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.BUILD:
                # what the body is made of is unpickled where it is built, so that its imports run on the main thread
                self._put(Job(frame.call, "construction", lambda: self._build(*frame.value())))
            case Kind.CALL:
                self._accept_call(frame)
            case Kind.STREAM:
                name, args, kwargs, subject, window = frame.value()
                self._credits[frame.call] = asyncio.Semaphore(window)
                with logs.about(**subject):
                    self._start(frame.call, self._stream(frame.call, name, self._method(name), args, kwargs))
            case Kind.CREDIT:
                if credit := self._credits.get(frame.call):
                    for _ in range(frame.value()):
                        credit.release()
            case Kind.CANCEL:
                self._cancel(frame.call)
            case Kind.STOP:
                self._winding_down = asyncio.create_task(self._wind_down())
            case _:
                raise WorkerError(f"{self._name}: frame {frame.kind!r} is not for a child")

    def _accept_call(self, frame: Frame) -> None:
        name, args, kwargs, subject = frame.value()
        method = self._method(name)
        with logs.about(**subject):
            if inspect.iscoroutinefunction(method):
                self._start(frame.call, self._call(frame.call, name, method(*args, **kwargs)))
            else:
                about = contextvars.copy_context()
                self._put(Job(frame.call, name, lambda: about.run(method, *args, **kwargs)))

    def _method(self, name: str) -> Callable[..., Any]:
        method = None if name.startswith("_") else getattr(self._body, name, None)
        if not callable(method):
            raise InvalidInput(
                f"worker {self._name}: {type(self._body).__name__} has no method {name!r}", field="method"
            )
        return method  # type: ignore[no-any-return]

    def _put(self, job: Job) -> None:
        self._waiting.add(job.call)
        self._jobs.put(job)

    def _start(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[call] = task
        task.add_done_callback(lambda _: (self._tasks.pop(call, None), self._credits.pop(call, None)))

    def _cancel(self, call: int) -> None:
        task = self._tasks.get(call)
        if task is not None:
            task.cancel()
        else:
            self._waiting.discard(call)

    async def _wind_down(self) -> None:
        """Let what runs on the io lane clean up, then end the main lane."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._jobs.put(None)

    async def _call(self, call: int, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            answer = self._frame(Kind.VALUE, call, name, await work)
        except Exception as error:
            answer = self._failure(call, name, error)
        await self._channel.send(answer)

    async def _stream(self, call: int, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            if not inspect.isasyncgenfunction(method):
                raise InvalidInput(f"worker {self._name}: {name} is no async generator", remedy="use call()")
            items = method(*args, **kwargs)
            try:
                async for item in items:
                    await self._credits[call].acquire()
                    await self._channel.send(self._frame(Kind.ITEM, call, name, item))
            finally:
                await items.aclose()
            answer = Frame.of(Kind.END, call, None)
        except Exception as error:
            answer = self._failure(call, name, error)
        await self._channel.send(answer)

    # answers

    def _frame(self, kind: Kind, call: int, what: str, value: Any) -> Frame:
        try:
            return Frame.of(kind, call, value)
        except Exception as error:
            raise WorkerError(
                f"worker {self._name}: the result of {what} ({type(value).__name__}) cannot be pickled: {error}"
            ) from error

    def _failure(self, call: int, what: str, error: Exception) -> Frame:
        text = "".join(traceback.format_exception(error))
        print(f"{what} failed\n{text}", file=sys.stderr, flush=True)
        if isinstance(error, NereusError):
            return Frame.of(Kind.FAILED, call, error)
        return Frame.of(
            Kind.FAILED,
            call,
            WorkerError(
                f"worker {self._name}: {what} raised {type(error).__name__}: {error}",
                worker=self._name,
                method=what,
                traceback=text,
            ),
        )
