"""Bodies that the worker tests run in real processes."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import StaleVersion
from nereus_common.observe import logs


class Desk:
    """Answers, fails, streams, sleeps and breeds on demand."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.closed_generators = 0
        self.produced = 0
        self.segment: shared_memory.SharedMemory | None = None
        print(f"desk is open, pid {os.getpid()}")

    def close(self) -> None:
        print("desk is closed")

    def echo(self, value: Any) -> Any:
        return value

    def thread(self) -> str:
        return threading.current_thread().name

    async def io_thread(self) -> str:
        return threading.current_thread().name

    def double(self, array: NDArray[Any]) -> NDArray[Any]:
        array *= 2
        return array

    def refuse(self) -> None:
        raise StaleVersion("version 3 is no longer held", remedy="ask for 4", version=3)

    def stumble(self) -> None:
        raise ZeroDivisionError("no such share")

    def unspeakable(self) -> Any:
        return threading.Lock()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def talk(self, lines: int) -> None:
        for number in range(lines):
            print(f"line {number}")

    def subject(self) -> dict[str, str]:
        logging.getLogger("desk").info("asked")
        return dict(logs.subject())

    async def subject_async(self) -> dict[str, str]:
        return dict(logs.subject())

    def leave(self, status: int) -> None:
        print("leaving")
        os._exit(status)

    async def count(self, to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                self.produced += 1
                yield number
        finally:
            self.closed_generators += 1

    async def count_then_fail(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
        raise StaleVersion("counted out")

    def seen(self) -> tuple[int, int]:
        return self.produced, self.closed_generators

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def breed(self) -> list[int]:
        """A child in our session, and one in a session of its own."""
        nap = [sys.executable, "-c", "import time; time.sleep(300)"]
        stay = subprocess.Popen(nap)
        leave = subprocess.Popen(nap, start_new_session=True)
        return [stay.pid, leave.pid]

    def map_segment(self, size: int) -> str:
        self.segment = shared_memory.SharedMemory(create=True, size=size)
        # as an engine that is killed leaves it: nobody else will unlink it
        resource_tracker.unregister(self.segment._name, "shared_memory")  # type: ignore[attr-defined]
        np.ndarray(size, np.uint8, self.segment.buf)[:] = 1
        return self.segment.name


class Slow:
    def __init__(self, config: dict[str, Any]) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        time.sleep(300)


class Broken:
    def __init__(self, config: dict[str, Any]) -> None:
        raise StaleVersion("cannot be built", version=9)
