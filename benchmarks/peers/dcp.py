"""A reshard by torch.distributed.checkpoint: the old ranks save to tmpfs, the new ranks load.

The ranks are real processes of the same layouts, built by the same code as our training ranks, with the same state:
float32 parameters, both moments and a counter per parameter, as DTensors. No digest is taken; what was loaded is
compared with what was saved outside of the measured time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any

from pydantic import Field

from benchmarks.training_units import SECONDS, plan_of
from nereus_common.config import Settings, load
from nereus_common.core.errors import VerificationFailed
from nereus_common.core.plan import StagePlan
from nereus_common.engines.options import Rendezvous
from nereus_common.rpc.ports import free_port
from nereus_common.stages.worker_set import WorkerSet
from nereus_common.workers import WorkerSpec

BODY = "benchmarks.peers.dcp_rank:DcpRank"


class DcpConfig(Settings):
    """The frozen set-up; see dcp.yaml. `environment`: variables of its processes."""

    threads_per_rank: Annotated[int, Field(ge=1)]
    single_file_per_rank: bool
    sync_files: bool
    plan_caching: bool
    folder: Path
    environment: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DcpRankConfig:
    """Rank `rank` of all `plan`'s replicas together. `threads`: of torch."""

    model: Path
    plan: StagePlan
    rank: int
    rendezvous: Rendezvous
    threads: int
    setup: DcpConfig


@dataclass(frozen=True, slots=True)
class DcpReshard:
    """Seconds of a reshard, and of the stop and the start of the processes between its halves."""

    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    stop: float = 0.0
    start: float = 0.0
    bytes: int = 0
    """Of the files."""

    @property
    def seconds(self) -> float:
        """Save and load, each at its median."""
        return statistics.median(self.save) + statistics.median(self.load)

    @property
    def restart_seconds(self) -> float:
        """What a job that is stopped and restarted on the new layout loses: save, stop, start, load."""
        return self.seconds + self.stop + self.start


def dcp_config() -> DcpConfig:
    return load(DcpConfig, Path(__file__).with_name("dcp.yaml"), {})


async def dcp_reshard(model: Path, old: str, new: str, logs: Path, repeat: int) -> DcpReshard:
    """From layout `old` to `new`, `repeat` times; a first save and a first load are not counted.

    VerificationFailed when a rank did not get back what was saved.
    """
    setup = dcp_config()
    folder = Path(mkdtemp(prefix="nereus-dcp-", dir=setup.folder))
    try:
        saver = _ranks(model, old, logs / "save", setup)
        await saver.start(SECONDS)
        try:
            await saver.call_each("fill", timeout=SECONDS)
            saves = await _timed(repeat, lambda: saver.call_each("save", folder, timeout=SECONDS))
        finally:
            stop = await _seconds(saver.stop())
        loader = _ranks(model, new, logs / "load", setup)
        try:
            start = await _seconds(loader.start(SECONDS))
            await loader.call_each("expect", timeout=SECONDS)
            loads = await _timed(repeat, lambda: loader.call_each("load", folder, timeout=SECONDS))
            wrong = sorted({name for found in await loader.call_each("wrong", timeout=SECONDS) for name in found})
        finally:
            await loader.stop()
        if wrong:
            raise VerificationFailed(f"the peer lost state from {old} to {new}: {', '.join(wrong[:3])} …")
        return DcpReshard(saves, loads, stop, start, _size(folder))
    finally:
        shutil.rmtree(folder)


def _ranks(model: Path, layout: str, logs: Path, setup: DcpConfig) -> WorkerSet:
    """One process per rank of all replicas; they start as our units' do."""
    plan = plan_of(layout)
    meeting = Rendezvous("127.0.0.1", free_port(), "dcp")
    count = plan.layout.ranks * plan.replicas
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    configs = [DcpRankConfig(model, plan, rank, meeting, threads, setup) for rank in range(count)]
    specs = [WorkerSpec(f"dcp.{one.rank}", BODY, one, logs / f"{one.rank}.log", setup.environment) for one in configs]
    return WorkerSet(specs, lambda lost: None)  # whoever calls it next hears of a loss


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


async def _timed(repeat: int, call: Callable[[], Coroutine[Any, Any, Any]]) -> list[float]:
    return [await _seconds(call()) for _ in range(repeat + 1)][1:]


async def _seconds(work: Coroutine[Any, Any, Any]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started
