"""The service's side of the reaper: one per process, started on demand, started again should it die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import ClassVar

from nereus_common.workers.processes import Identity

RESTART_SECONDS = 0.2


class ReaperLink:
    """Thread-safe, and bound to no event loop. Use `ReaperLink.shared()`."""

    _instance: ClassVar[ReaperLink | None] = None
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[Identity, str] = {}
        self._sweeping: dict[Identity, Future[int]] = {}
        self._process = _spawn()
        threading.Thread(target=self._listen, name="reaper-link", daemon=True).start()

    @classmethod
    def shared(cls) -> ReaperLink:
        with cls._guard:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, root: Identity, mark: str) -> None:
        """Have the family of `root` cleaned up whatever happens; `mark` is in the environment of all of it."""
        with self._lock:
            self._watched[root] = mark
            self._tell(f"watch {root.pid} {root.start} {mark}")

    def sweep(self, root: Identity) -> Future[int]:
        """Kill what is left of the family of `root`, unlink its segments, forget it. Result: processes left alive."""
        with self._lock:
            done = self._sweeping.setdefault(root, Future())
            self._tell(f"sweep {root.pid} {root.start}")
            return done

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it just died; its successor is told everything again

    def _listen(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                _, pid, start, left = line.split()
                self._swept(Identity(int(pid), int(start)), int(left))
            self._restart()

    def _swept(self, root: Identity, left: int) -> None:
        with self._lock:
            self._watched.pop(root, None)
            done = self._sweeping.pop(root, None)
        if done is not None:
            done.set_result(left)

    def _restart(self) -> None:
        time.sleep(RESTART_SECONDS)
        with self._lock:
            _bury(self._process)
            self._process = _spawn()
            for root, mark in self._watched.items():
                self._tell(f"watch {root.pid} {root.start} {mark}")
            for root in self._sweeping:
                self._tell(f"sweep {root.pid} {root.start}")


def _spawn() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "nereus_common.workers.reaper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _bury(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was still buffered is told to the successor
