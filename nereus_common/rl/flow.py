"""Which prompt may be started, and which groups make up a step: the order of rollouts as a plain state machine.

No clock and no I/O. A job's steps consume whole groups in the order of their positions. A position may be started as
soon as it cannot become too old: sampled from version v and consumed at step s, a group is s - v versions old, and it
is consumed at the latest when all earlier positions that are still wanted have been. With η = 0 this very rule makes a
synchronous job: the groups of step s start when version s is served, and not before.

Staleness counts from a group's first token, whose version no later interruption can raise. A group that was lost is
started anew, from a version at least as new, so faults make samples fresher, never staler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nereus_common.core.errors import IllegalTransition

T = TypeVar("T")

REPLACING = 4
"""A step looks at no more than this many times its groups for some that are worth taking."""


@dataclass(frozen=True, slots=True)
class Pace:
    """`groups` a step, `steps` in all, `staleness` η ≥ 0. `replace`: groups without gradient are passed over."""

    groups: int
    steps: int
    staleness: int = 0
    replace: bool = False

    @property
    def looked_at(self) -> int:
        """How many positions a step uses up at most."""
        return self.groups * (REPLACING if self.replace else 1)


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """The groups of a step in the order of their positions, and the first position that is still to be consumed."""

    groups: tuple[T, ...]
    next_position: int


@dataclass(slots=True)
class _Done(Generic[T]):
    group: T
    version: int
    flat: bool


@dataclass(slots=True)
class RolloutFlow(Generic[T]):
    """`step` is being collected, `position` is the first not consumed, `version` is served to new groups."""

    pace: Pace
    step: int = 0
    position: int = 0
    version: int = 0
    paused: bool = False
    """While weights are taken over nothing is started."""
    _fresh: int = field(default=0, init=False)
    _again: list[int] = field(default_factory=list, init=False)
    _running: dict[int, int] = field(default_factory=dict, init=False)
    _done: dict[int, _Done[T]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._fresh = self.position

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(sorted(self._running))

    @property
    def missing(self) -> tuple[int, ...]:
        """Positions of the current step that are not done."""
        return tuple(p for p in range(self.position, self.position + self.pace.groups) if p not in self._done)

    def start(self) -> int | None:
        """The next position to sample, or None while none may be started."""
        again = bool(self._again)
        position = min(self._again) if again else self._fresh
        if self.paused or not self.may_start(position):
            return None
        if again:
            self._again.remove(position)
        else:
            self._fresh += 1
        self._running[position] = self.version
        return position

    def may_start(self, position: int) -> bool:
        """Whether a group sampled from now on is consumed by the job, and no more than η versions old."""
        latest = self.step + self._steps_before(position)
        return latest < self.pace.steps and latest - self.version <= self.pace.staleness

    def _steps_before(self, position: int) -> int:
        """How many steps, at most, can be made of the positions between the first not consumed and this one.

        Each uses up its number of worthy groups or, when there are too few, all that it may look at.
        """
        ahead = position - self.position
        if not self.pace.replace:
            return ahead // self.pace.groups
        flat = sum(done.flat for place, done in self._done.items() if place < position)
        return (ahead - flat) // self.pace.groups + ahead // self.pace.looked_at

    def finish(self, position: int, group: T, *, oldest: int, flat: bool = False) -> None:
        """A started group is whole. `oldest`: the version of its oldest token. `flat`: it has no gradient."""
        started = self._running.pop(position, None)
        if started is None or oldest < started:
            raise IllegalTransition(f"the group at {position} was started from {started} and ends with {oldest}")
        self._done[position] = _Done(group, oldest, flat)

    def lose(self, position: int) -> None:
        """A started group will not be finished: it is to be started again."""
        if self._running.pop(position, None) is None:
            raise IllegalTransition(f"the group at {position} was not running")
        self._again.append(position)

    def serve(self, version: int) -> None:
        """New groups are sampled from `version`."""
        if version < self.version:
            raise IllegalTransition(f"version {version} is served after {self.version}")
        self.version, self.paused = version, False

    def take(self) -> Taken[T] | None:
        """The groups of the current step, and on to the next; None while some are missing.

        IllegalTransition when one is staler than η: that would be a fault of this class.
        """
        chosen = self._chosen()
        if chosen is None:
            return None
        positions, stop = chosen
        groups = [self._done[position] for position in positions]
        for position, done in zip(positions, groups, strict=True):
            if self.step - done.version > self.pace.staleness:
                raise IllegalTransition(
                    f"step {self.step} would consume position {position}, sampled from version {done.version}"
                )
        for position in range(self.position, stop):
            del self._done[position]
        self.step, self.position = self.step + 1, stop
        return Taken(tuple(done.group for done in groups), stop)

    def _chosen(self) -> tuple[list[int], int] | None:
        """Positions of the step and the position after the last one looked at."""
        wanted, limit = self.pace.groups, self.pace.looked_at
        worthy: list[int] = []
        flat: list[int] = []
        for position in range(self.position, self.position + limit):
            done = self._done.get(position)
            if done is None:
                return None
            (flat if self.pace.replace and done.flat else worthy).append(position)
            if len(worthy) == wanted:
                return worthy, position + 1
        return sorted([*worthy, *flat[: wanted - len(worthy)]]), self.position + limit
