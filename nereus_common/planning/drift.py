"""When to look for another plan: signals of a running job, compared with what they were at the last replan.

        observe ──nothing crossed──► wait
           │
        crossed (a threshold, the pool, memory) ──► replan is due ──replanned──► references are what was observed

The paper's §4.1 and §4.3. A crossing is counted once, at the first step that shows it; what a replan finds, and whether
its target is admitted, does not matter to it. The intervals between the crossings of a signal give its horizon: for how
many steps a plan that answers this crossing will be of use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId

POOL, MEMORY, LENGTH = "pool", "memory", "length"
"""Signals of every job. Achieved efficiencies are signals too, by their operation class: "efficiency.gemm"."""
EFFICIENCY = "efficiency."
DEFAULT_THRESHOLDS: Mapping[str, float] = MappingProxyType({LENGTH: 0.30, EFFICIENCY: 0.20})
"""Relative; the first is the paper's. A signal named by its prefix stands for all of that prefix."""
SMOOTHING = 0.5
"""Weight of the newest interval in a horizon."""
UNKNOWN_HORIZON = 1.0
"""Steps, before a first interval was seen."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A job after `step`. `values` of the drifting signals, positive; what was not measured is left out.

    `misfits`: devices on which the plan in force is predicted to exceed memory.
    """

    step: int
    pool: frozenset[DeviceId]
    values: Mapping[str, float]
    misfits: frozenset[DeviceId] = frozenset()

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(
                    f"signal {name} is {value!r} after step {self.step}",
                    remedy="leave out what was not measured",
                    field=name,
                )


@dataclass(frozen=True, slots=True)
class Crossing:
    """`signal` went from `reference` to `value`: sizes for the pool, devices that lack memory for MEMORY."""

    signal: str
    reference: float
    value: float
    urgent: bool = False

    @property
    def change(self) -> float:
        """Relative."""
        return self.value / self.reference - 1 if self.reference else math.inf


@dataclass(frozen=True, slots=True)
class Drift:
    """`reference`: as observed at the last replan. `due`: what has crossed since, by signal.

    `last`: the step of each signal's last crossing; `intervals`: the moving average of the steps between them.
    """

    reference: Observed
    due: Mapping[str, Crossing] = field(default_factory=dict)
    last: Mapping[str, int] = field(default_factory=dict)
    intervals: Mapping[str, float] = field(default_factory=dict)

    @property
    def urgent(self) -> bool:
        """Whether the plan in force cannot be kept: it uses devices that are gone, or exceeds memory."""
        return any(crossing.urgent for crossing in self.due.values())

    @property
    def horizon(self) -> float:
        """Steps until the next crossing of the signals that are due, the smallest of theirs: H of Eq. 2."""
        return min((self.intervals.get(name, UNKNOWN_HORIZON) for name in self.due), default=UNKNOWN_HORIZON)


def observe(
    drift: Drift,
    now: Observed,
    used: Iterable[DeviceId],
    thresholds: Mapping[str, float] = DEFAULT_THRESHOLDS,
) -> Drift:
    """What has crossed after another step. `used`: the devices of the plan in force.

    A signal that is measured for the first time has nothing to be compared with: its value becomes its reference.
    """
    reference = replace(drift.reference, values={**now.values, **drift.reference.values})
    found = [one for one in _crossings(reference, now, frozenset(used), thresholds) if one.signal not in drift.due]
    intervals = dict(drift.intervals)
    for signal in (one.signal for one in found):
        if signal in drift.last:
            seen = float(now.step - drift.last[signal])
            intervals[signal] = seen + (1 - SMOOTHING) * (intervals.get(signal, seen) - seen)
    return Drift(
        reference,
        {**drift.due, **{one.signal: one for one in found}},
        {**drift.last, **{one.signal: now.step for one in found}},
        intervals,
    )


def replanned(drift: Drift, now: Observed) -> Drift:
    """After a replan, whatever came of it: the next crossing is counted from here. What is not measured now keeps its
    reference."""
    values = {**drift.reference.values, **now.values}
    return replace(drift, reference=replace(now, values=values), due={})


def _crossings(
    reference: Observed, now: Observed, used: frozenset[DeviceId], thresholds: Mapping[str, float]
) -> Iterable[Crossing]:
    if now.pool != reference.pool:
        yield Crossing(POOL, len(reference.pool), len(now.pool), urgent=not used <= now.pool)
    if now.misfits - reference.misfits:
        yield Crossing(MEMORY, len(reference.misfits), len(now.misfits), urgent=True)
    for signal, value in now.values.items():
        before, limit = reference.values[signal], _threshold(signal, thresholds)
        if abs(value - before) > limit * before:
            yield Crossing(signal, before, value)


def _threshold(signal: str, thresholds: Mapping[str, float]) -> float:
    prefix = signal.partition(".")[0] + "."
    found = thresholds.get(signal, thresholds.get(prefix))
    if found is None:
        raise InvalidInput(
            f"there is no threshold for signal {signal}",
            remedy=f"set one, or one for all {prefix}*",
            field=f"thresholds.{signal}",
        )
    return found
