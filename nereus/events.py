"""What a job reports while it runs, as frozen values. `docs/events.md` explains every field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Self, TypeAlias


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


class Payload:
    """A payload that ignores fields it does not know and takes defaults for those that are absent."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        known = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, slots=True)
class StateChange(Payload):
    state: JobState
    epoch: int = 0
    plan: Mapping[str, Any] | None = None
    plan_id: str = ""
    error_reason: str = ""
    error_message: str = ""
    error_log: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", JobState(self.state))
        object.__setattr__(self, "error_log", tuple(self.error_log))


@dataclass(frozen=True, slots=True)
class SyncReport(Payload):
    """A weight sync. Bytes moved are counted at the transport."""

    bytes_moved: int
    bytes_needed: int
    seconds: float
    model: str = "actor"
    version: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport(Payload):
    step: int
    reward_mean: float
    tokens: int
    seconds: Mapping[str, float]
    reward_std: float = 0.0
    version: int = 0
    response_length_mean: float = 0.0
    finished_fraction: float = 0.0
    logprob_gap_mean: float = 0.0
    logprob_gap_max: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    clip_fraction: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    reference_kl: float = 0.0
    training_seconds: Mapping[str, float] = field(default_factory=dict)
    training_peak_memory_bytes: int = 0
    sync: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Every number that was sent, those that have no field of their own here among them; one inside an object has a
    name like `seconds.total`."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        known = {entry.name for entry in fields(cls)} - {"metrics"}
        return cls(**{key: value for key, value in data.items() if key in known}, metrics=dict(_numbers(data)))

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of the whole step."""
        total = self.seconds.get("total", 0.0)
        return self.tokens / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Evaluation(Payload):
    when: str
    mode: str
    mean: float
    low: float
    high: float
    n: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint(Payload):
    """A checkpoint is complete; it holds `step` finished steps. `seconds`: of `snapshot`, for which the job waited, and
    of `write`, beside which it went on."""

    step: int
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Restart(Payload):
    """Attempt number `attempt` (from 1) begins; `from_step` steps count as finished from here on."""

    attempt: int
    from_step: int
    reason: str = ""
    message: str = ""


BESIDE = ("prepare", "release")
"""Phases of a transition during which the job steps on."""


@dataclass(frozen=True, slots=True)
class TransitionChange(Payload):
    """A change of plan has come to another state. `seconds` by phase so far; `step`: the version it ran at."""

    transition_id: str
    state: str
    from_epoch: int = 0
    epoch: int = 0
    step: int = -1
    target_plan_id: str = ""
    bytes_moved: int = 0
    bytes_needed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[Mapping[str, Any]] = ()
    reason: str = ""
    message: str = ""

    @property
    def still_seconds(self) -> float:
        """How long the job stood still: new units are prepared beside it, and old ones released."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase not in BESIDE)


@dataclass(frozen=True, slots=True)
class PlanDecision(Payload):
    """What the job's autopilot decided after `step`. `drifted`: what made it look; `targets`: what it weighed, the
    fastest first. `taken`: the id of the plan it would take, "" for none; `transition_id`: of the move it asked for."""

    step: int
    mode: str
    plan_id: str = ""
    taken: str = ""
    transition_id: str = ""
    urgent: bool = False
    drifted: Sequence[Mapping[str, Any]] = ()
    step_seconds: float | None = None
    task_seconds: Mapping[str, float] = field(default_factory=dict)
    confidence: float = 0.0
    horizon: float = 0.0
    gamma: float = 0.0
    targets: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LogLine(Payload):
    message: str
    level: str = "info"


Report: TypeAlias = (
    StateChange
    | SyncReport
    | StepReport
    | Evaluation
    | Checkpoint
    | Restart
    | TransitionChange
    | PlanDecision
    | LogLine
)

KINDS: Mapping[str, type[Report]] = {
    "state": StateChange,
    "sync": SyncReport,
    "step": StepReport,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "restart": Restart,
    "transition": TransitionChange,
    "decision": PlanDecision,
    "log": LogLine,
}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`payload` is what was sent; `value` is it as a typed report, or None for a kind this version does not know."""

    revision: str
    time: datetime
    kind: str
    payload: Mapping[str, Any]

    @property
    def value(self) -> Report | None:
        kind = KINDS.get(self.kind)
        return None if kind is None else kind.of(self.payload)


def _numbers(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a payload, by its dotted name; truth values and lists are none."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{key}", value
