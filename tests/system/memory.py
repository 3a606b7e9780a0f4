"""Memory of processes as the kernel counts it: private pages, and of shared ones each process's share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"process {pid} has no Pss")


class PeakOf:
    """The most that `pids` take together while the context is open, looked at every `every` seconds."""

    def __init__(self, pids: Sequence[int], every: float = 0.05) -> None:
        self._pids, self._every = pids, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, sum(pss_bytes(pid) for pid in self._pids))
            self._stop.wait(self._every)
