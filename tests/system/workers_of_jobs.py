"""Which process works for which job."""

from __future__ import annotations

import time
from pathlib import Path

from nereus.cluster.state import ClusterState
from nereus_common.workers import processes


def worker_pid(cluster: ClusterState, job: str, stage: str) -> int:
    """The pid of a worker of the job's unit of that stage, found by its command line."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for one in processes.marked(cluster.mark, processes.snapshot()):
            command = Path(f"/proc/{one.pid}/cmdline").read_bytes().decode(errors="replace")
            if job in command and f".{stage}." in command:
                return one.pid
        time.sleep(0.2)
    raise AssertionError(f"no worker of {job}/{stage}")
