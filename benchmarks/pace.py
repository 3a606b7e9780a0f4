"""How fast a job steps, from the moments at which its steps ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nereus.events import JobEvent, StepReport

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Wall seconds of each measured step: from the end of the step before it to its own, with all that lies between."""

    seconds: tuple[float, ...]

    @classmethod
    def between(cls, ends: Sequence[float], warm_up: int) -> Pace:
        """`ends`: in seconds, in order; the first `warm_up` ≥ 1 steps are left out: shapes are compiled in them."""
        if not 1 <= warm_up < len(ends):
            raise ValueError(f"{len(ends)} steps leave nothing to measure after {warm_up} of warm-up; at least 1 of it")
        return cls(tuple(after - before for before, after in pairwise(ends[warm_up - 1 :])))

    @property
    def steps_per_hour(self) -> float:
        return HOUR * len(self.seconds) / sum(self.seconds)

    @property
    def spread(self) -> list[float]:
        """Steps per hour of the slowest and of the fastest measured step."""
        return [HOUR / max(self.seconds), HOUR / min(self.seconds)]


def step_ends(events: Iterable[JobEvent]) -> list[float]:
    """Seconds since the Unix epoch at which each step of a job ended."""
    return [event.time.timestamp() for event in events if isinstance(event.value, StepReport)]
