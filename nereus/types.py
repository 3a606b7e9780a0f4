"""What the client returns: frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from nereus.events import JobState
from nereus_common.core.errors import JobFailed
from nereus_common.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the controller knew it when asked. `steps_done` counts finished RL steps; the last complete checkpoint
    holds `checkpoint_step` of them, 0: there is none."""

    id: str
    state: JobState
    spec_json: str
    plan: Plan | None
    epoch: int
    steps_done: int
    error_reason: str
    error_message: str
    error_log: tuple[str, ...]
    created: datetime | None
    ended: datetime | None
    folder: str
    checkpoint_step: int = 0

    def check(self) -> Job:
        """Return itself; raise JobFailed, with the reason and the end of the log, when the job failed."""
        if self.state is JobState.FAILED:
            raise JobFailed(
                f"job {self.id} failed: {self.error_message}",
                job=self.id,
                cause=self.error_reason,
                log="\n".join(self.error_log),
            )
        return self


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded sample of a step (from 0, as in `step` events). docs/events.md explains every field."""

    step: int
    position: int
    sample: int
    prompt: str
    response: str
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    finished: bool = True
    tokens: int = 0
    versions: tuple[int, ...] = ()
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """`granted_bytes` of `memory_bytes` are promised to `units`."""

    id: str
    kind: str
    memory_bytes: int
    granted_bytes: int
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    target: str
    node: str
    alive: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    devices: tuple[Device, ...]
    services: tuple[Service, ...]
