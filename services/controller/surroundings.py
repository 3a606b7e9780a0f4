"""What every job of this controller shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nereus.spec import JobSpec
from nereus_common.core.ids import JobId
from nereus_common.observe.metrics import JobMetrics
from nereus_common.registry import Registry
from nereus_common.rpc.pool import Channels

from .journal import JobJournal
from .moves import MoveQueue


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`series`: its jobs' metrics for Prometheus. `clock` gives seconds since the Unix epoch."""

    registry: Registry
    channels: Channels
    jobs_folder: Path
    series: JobMetrics | None = None
    clock: Callable[[], float] = time.time
    queues: dict[JobId, MoveQueue] = field(default_factory=dict)
    """By job, the transitions that were asked for."""

    def folder(self, job: JobId) -> Path:
        """What a job writes goes here."""
        return self.jobs_folder / job

    def moves(self, job: JobId) -> MoveQueue:
        return self.queues.setdefault(job, MoveQueue())

    def journal(self, job: JobId) -> JobJournal:
        return JobJournal(job, self.folder(job), self.registry, self.clock)

    def checkpoints(self, job: JobId, spec: JobSpec) -> Path:
        """Its checkpoints go here."""
        return spec.checkpoint.root(job, self.folder(job))
