"""What the registry keeps: frozen values, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from nereus_common.core.ids import DeviceId, JobId, TransitionId, UnitId
from nereus_common.core.plan import Plan
from nereus_common.transitions.lifecycle import NodeState, TransitionState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A stored value and its revision (1 when created, one more on each write): what the next writer must expect."""

    value: T
    revision: int


@dataclass(frozen=True, slots=True)
class Device:
    """A slot of a node with a budget of `memory_bytes`. `kind`: "cpu" or what the driver calls the accelerator."""

    id: DeviceId
    kind: str
    memory_bytes: int

    @property
    def node(self) -> str:
        return self.id.node


@dataclass(frozen=True, slots=True)
class Grant:
    """`bytes` of `device` that `unit` may use in `phase`."""

    device: DeviceId
    unit: UnitId
    phase: str
    bytes: int


class JobState(StrEnum):
    PENDING = "pending"
    PLACING = "placing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its users see it. Times in seconds since the Unix epoch, given by whoever writes the record."""

    id: JobId
    spec_json: str
    created: float
    state: JobState = JobState.PENDING
    steps_done: int = 0
    error_reason: str = ""
    error_message: str = ""
    error_log: tuple[str, ...] = ()
    """The last lines of the log of the process that died, where that is why."""
    ended: float | None = None
    folder: str = ""
    """Where the job writes metrics and summaries."""
    attempts: int = 0
    """How often it was placed, or tried to be."""
    fruitless: int = 0
    """Restarts since the last new checkpoint."""
    checkpoint_step: int = 0
    """Finished steps that the newest complete checkpoint holds; 0: there is none."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One entry of a job's stream. Revisions of a job are 1, 2, 3 …, so a gap shows."""

    revision: int
    kind: str
    payload_json: str
    time: float

    @property
    def payload(self) -> Any:
        return json.loads(self.payload_json)


@dataclass(frozen=True, slots=True)
class CommittedPlan:
    """The plan in force from `epoch` on. Epoch 0 is "no plan yet" and never stored."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """A transition as its journal has it. Times in seconds since the Unix epoch, `seconds` by phase.

    `nodes`: the state of each node of its DAG, by id; `dag_json`: that DAG, for readers. `units`: what it has made or
    begun to make; `kept`: what stays as it is; `rounds`: how many rounds of an in-place move are durable, by node;
    `digests`: by node and kind, what its old units held while they were whole. `step`: the version it ran at, or -1.
    """

    id: TransitionId
    job: JobId
    from_epoch: int
    plan: Plan
    target: Plan
    created: float
    state: TransitionState = TransitionState.PLANNED
    dag_json: str = "{}"
    nodes: tuple[NodeState, ...] = ()
    units: tuple[UnitId, ...] = ()
    kept: tuple[UnitId, ...] = ()
    rounds: Mapping[int, int] = field(default_factory=dict)
    digests: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    step: int = -1
    bytes_moved: int = 0
    bytes_needed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error_reason: str = ""
    error_message: str = ""
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A name held for `ttl` seconds after each renewal.

    `holder` is a token of one life of one process; `fence` rises with every change of holder, so whoever acts under
    an older one can be refused. `record` is what the holder publishes under the name.
    """

    name: str
    holder: str
    fence: int
    ttl: float
    record: str = ""


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """`remaining`: seconds until the lease lapses, at or below 0 when it has; it stays listed until released."""

    lease: Lease
    remaining: float

    @property
    def alive(self) -> bool:
        return self.remaining > 0


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A running service. `role`: a stage, "controller" or "coordinator"; `target`: where its gRPC server listens.

    `log`: its log file on that node, for whoever has to say how it ended. `metrics`: the page that Prometheus reads.
    """

    name: str
    role: str
    target: str
    node: str
    devices: tuple[DeviceId, ...] = ()
    log: str = ""
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    service: ServiceRecord
    lease: Lease
    alive: bool
