"""Memory of processes by device while something happens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from nereus_common.core.errors import ProcessLost
from nereus_common.core.ids import DeviceId
from nereus_common.workers.memory import pss_bytes

EVERY = 0.02
"""Seconds between two looks."""


def pss_by_device(pids: Mapping[DeviceId, Sequence[int]]) -> dict[DeviceId, int]:
    """What the processes on each device take together."""
    return {device: sum(map(pss_bytes, several)) for device, several in pids.items()}


class Peaks:
    """The most that the processes of each device take together while the context is open.

    It looks every `EVERY` seconds and once at the end: what comes and goes in between is not seen.
    """

    def __init__(self, pids: Mapping[DeviceId, Sequence[int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._failure: ProcessLost | None = None
        self.bytes = dict.fromkeys(pids, 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        try:
            while not self._stop.wait(EVERY):
                self._look()
            self._look()
        except ProcessLost as lost:
            self._failure = lost

    def _look(self) -> None:
        for device, now in pss_by_device(self._pids).items():
            self.bytes[device] = max(self.bytes[device], now)
