"""Runs the demo on a cluster of its own and takes that down again, however it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import down
from nereus.cluster.memory import PeakMemory
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.demo.job import commonest_answer, demo_spec
from nereus.demo.report import DemoReport
from nereus.events import JobEvent
from nereus.sync import SyncClient, SyncJobHandle
from nereus_common.core.errors import Conflict

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    task: str = "letter_counting"
    steps: int = 16
    seed: int = 0
    heldout: int = 300


def run_demo(
    folder: ClusterFolder,
    config: ClusterConfig,
    options: DemoOptions,
    *,
    say: Report,
    show: Callable[[JobEvent], None],
) -> DemoReport:
    """Run it to the end. Raises JobFailed when the job fails; an interrupt cancels the job first."""
    begun = time.monotonic()
    report = DemoReport()
    spec = demo_spec(
        config.device_ids, task=options.task, steps=options.steps, seed=options.seed, heldout=options.heldout
    )
    report.commonest_answer = commonest_answer(spec)
    with (
        _cluster(folder, config, say) as state,
        PeakMemory(state) as memory,
        SyncClient.connect(state.controller, data_dir=folder.path) as client,
    ):
        job = client.submit(spec)
        say(f"job {job.id}")
        _follow(job, report, show)
    report.wall_seconds = time.monotonic() - begun
    report.peak_memory_bytes = memory.bytes
    return report


def _follow(job: SyncJobHandle, report: DemoReport, show: Callable[[JobEvent], None]) -> None:
    try:
        for event in report.taking(job.watch()):
            show(event)
    except KeyboardInterrupt:
        job.cancel()
        raise
    job.get().check()


@contextmanager
def _cluster(folder: ClusterFolder, config: ClusterConfig, say: Report) -> Iterator[ClusterState]:
    """A cluster for the demo alone."""
    earlier = folder.read()
    if earlier is not None and any(member.alive for member in earlier.members):
        raise Conflict(
            f"a cluster runs in {folder.path} already", remedy="run `nereus down`, or give the demo another --data-dir"
        )
    state = up(folder, config, report=say)
    try:
        yield state
    finally:
        down(folder, grace=config.stop_seconds, report=say)


def demo_folder(data_dir: Path) -> ClusterFolder:
    return ClusterFolder(data_dir / "demo")
