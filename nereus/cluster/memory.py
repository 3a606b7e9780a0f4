"""The memory of a cluster: the proportional set size (PSS) of all its processes together."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Self

from nereus.cluster.state import ClusterState
from nereus_common.core.errors import ProcessLost
from nereus_common.workers import processes
from nereus_common.workers.memory import pss_bytes

SAMPLE_SECONDS = 2.0


def cluster_bytes(state: ClusterState, *, with_self: bool = True) -> int:
    """PSS of every process of the cluster now, and of the calling one where `with_self`."""
    table = processes.snapshot()
    members = processes.marked(state.mark, table)
    for member in state.members:
        members |= processes.family(member.identity, (), table)
    pids = {one.pid for one in members} | ({os.getpid()} if with_self else set())
    return sum(map(_pss_if_there, pids))


def _pss_if_there(pid: int) -> int:
    """0 where it is gone, or not ours to look at."""
    try:
        return pss_bytes(pid)
    except (ProcessLost, PermissionError):
        return 0


class PeakMemory:
    """While it is entered, samples the cluster's memory in a thread; `bytes` is the highest sum seen."""

    def __init__(self, state: ClusterState, every: float = SAMPLE_SECONDS) -> None:
        self.bytes = 0
        self._state = state
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def sample(self) -> None:
        self.bytes = max(self.bytes, cluster_bytes(self._state))

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.sample()
