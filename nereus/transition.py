"""A transition as the client returns it: frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from nereus_common.core.errors import JobFailed
from nereus_common.core.plan import Plan
from nereus_common.transitions.lifecycle import TransitionState


@dataclass(frozen=True, slots=True)
class TransitionNode:
    """One primitive. `bytes`: received by the ranks of the new units. `state`: waiting, running, done or undone.

    `old_replicas`, `new_replicas`: which units of the old plan it reads or ends, and of the new plan it makes.
    """

    id: int
    primitive: str
    model_stage: str
    old_replicas: tuple[int, ...]
    new_replicas: tuple[int, ...]
    mode: str
    bytes: int
    acquires: Mapping[str, int]
    frees: Mapping[str, int]
    state: str


@dataclass(frozen=True, slots=True)
class TransitionEdge:
    """`kind`: data, a holder is not released before its reader is done; or resource, bytes freed are bytes acquired."""

    before: int
    after: int
    kind: str


@dataclass(frozen=True, slots=True)
class TransitionLink:
    """`bytes` that device `target` receives from `source`: in phase move, state that only the old units hold; in phase
    sync, weights from the units that train. `distance`: the smallest place both are in: device, node, switch or far."""

    source: str
    target: str
    phase: str
    bytes: int
    distance: str


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a job's plan. `peaks`, of `budgets`: bytes per device at any point.

    `seconds` by phase. `step`: the version at whose boundary it ran, -1 before. A dry run has no id; only it has
    `links`, the fullest first, and its `seconds` are predicted from the rates measured so far: none for a phase with a
    link that has carried nothing yet.
    """

    id: str
    job: str
    state: TransitionState | None
    from_epoch: int
    plan: Plan
    target: Plan
    nodes: tuple[TransitionNode, ...]
    edges: tuple[TransitionEdge, ...]
    peaks: Mapping[str, int]
    budgets: Mapping[str, int]
    bytes_moved: int
    bytes_needed: int
    seconds: Mapping[str, float]
    step: int
    error_reason: str
    error_message: str
    created: datetime | None
    ended: datetime | None
    links: tuple[TransitionLink, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.state is not None and self.state.ended

    def check(self) -> Transition:
        """Return itself; raise JobFailed where it has ended and the target is not in force."""
        if self.has_ended and self.state is not TransitionState.DONE:
            raise JobFailed(
                f"transition {self.id} of job {self.job} is {self.state}: {self.error_message}",
                cause=self.error_reason,
                job=self.job,
            )
        return self


@dataclass(frozen=True, slots=True)
class StateDigests:
    """What a model-stage holds at `version`, by kind: the same for every layout that holds the same bits."""

    version: int
    digests: Mapping[str, int]
