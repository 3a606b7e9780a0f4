"""A job on a cluster of its own, for benchmarks: every part is real, everything is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus.cluster.config import ClusterConfig, default_data_dir
from nereus.cluster.down import down
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.events import JobEvent
from nereus.spec import JobSpec
from nereus.sync import SyncClient

DEVICE_BYTES = 5 << 30


@contextmanager
def cluster(devices: int) -> Iterator[tuple[ClusterState, Path]]:
    """A cluster of `devices` CPU devices in a temporary folder."""
    config = ClusterConfig(devices={f"cpu{slot}": DEVICE_BYTES for slot in range(devices)})
    with tempfile.TemporaryDirectory(prefix="nereus-bench-") as path:
        folder = ClusterFolder(Path(path))
        state = up(folder, config)
        try:
            yield state, folder.path
        finally:
            down(folder, grace=config.stop_seconds)


def run_job(state: ClusterState, spec: JobSpec | Mapping[str, Any]) -> list[JobEvent]:
    """Submit, follow to the end, and return all events; JobFailed when it fails."""
    with SyncClient.connect(state.controller, data_dir=default_data_dir() / "demo") as client:
        job = client.submit(spec)
        events = list(job.watch())
        job.get().check()
    return events
