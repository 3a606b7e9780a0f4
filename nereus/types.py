"""What the client returns: frozen values, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from nereus.events import JobState
from nereus_common.core.errors import JobFailed
from nereus_common.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the controller knew it when asked. `steps_done` counts finished RL steps."""

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
