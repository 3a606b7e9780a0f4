"""A job under way, as planning follows it: what was measured becomes calibration, drift, and a question for the search.

    after_step(pilot, measured)  ──►  pilot'          every step
    targets(pilot', question)    ──►  plans           when a replan is due
    admission.admit              ──►  one of them, or the plan in force stays

Pure: the controller measures, prices the moves and carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nereus_common.core.errors import NereusError
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.plan import Plan
from nereus_common.planning.admission import NEAR
from nereus_common.planning.calibration import Calibration
from nereus_common.planning.cost import StepCost, step_cost
from nereus_common.planning.drift import (
    DEFAULT_THRESHOLDS,
    EFFICIENCY,
    LENGTH,
    Drift,
    Observed,
    observe,
    replanned,
)
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.job import BASELINE, Job
from nereus_common.planning.memory import device_bytes
from nereus_common.planning.question import Found, Question
from nereus_common.planning.search import search
from nereus_common.planning.workload import Workload

SETTLING = 2
"""Steps under a plan before anything is learned: caches are cold, and kernels are still being compiled."""
COUNTS = 0.1
"""The share of a step from which on an efficiency is a signal."""
KNOWN = 0.25
"""The relative spread up to which an efficiency counts as known, so that a change of it is drift and not learning."""
TARGETS = 4
"""Plans whose transitions are priced."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One step. `seconds`: of tasks and SYNC; what was not measured is left out. `workload`: with the lengths that were
    sampled. `cluster`: the pool as it is, `usable` of it."""

    step: int
    workload: Workload
    seconds: Mapping[str, float]
    cluster: Cluster
    usable: frozenset[DeviceId]


@dataclass(frozen=True, slots=True)
class Pilot:
    """`steps`: how many were measured under the plan in force. `cost`: the last step as it was predicted before it was
    measured. `widths`: see `Question`."""

    job: Job
    plan: Plan
    thresholds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_THRESHOLDS))
    calibration: Calibration = field(default_factory=Calibration)
    drift: Drift | None = None
    steps: int = 0
    cost: StepCost | None = None
    measured: Measured | None = None
    widths: Mapping[ModelStage, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether a replan is: something has drifted, or nothing was looked for yet."""
        return self.measured is not None and (self.drift is None or bool(self.drift.due))

    @property
    def urgent(self) -> bool:
        return self.drift is not None and self.drift.urgent

    def horizon(self, left: int) -> float:
        """Steps for which another plan would be of use, of the `left` ones: all, until a drift has come back."""
        known = self.drift is not None and all(name in self.drift.intervals for name in self.drift.due)
        return min(self.drift.horizon, left) if self.drift is not None and self.drift.due and known else float(left)


def after_step(pilot: Pilot, measured: Measured) -> Pilot:
    """What is known after a step. Nothing is learned while a plan settles, nor from a step that lacks a measurement."""
    steps, job = pilot.steps + 1, replace(pilot.job, workload=measured.workload)
    cost = step_cost(job, pilot.plan, measured.cluster, pilot.calibration)
    if steps <= SETTLING or not is_whole(measured.seconds, cost):
        return replace(pilot, steps=steps, cost=cost)
    calibration = pilot.calibration
    for nominal, seconds in phases(cost, measured.seconds):
        calibration = calibration.after(nominal, seconds)
    known = replace(pilot, job=job, steps=steps, cost=cost, calibration=calibration, measured=measured)
    drift = pilot.drift and observe(pilot.drift, observed(known), pilot.plan.devices, pilot.thresholds)
    return replace(known, drift=drift)


def is_whole(seconds: Mapping[str, float], cost: StepCost) -> bool:
    """Whether all that a model computes was measured."""
    return all(seconds.get(name, 0.0) > 0 for name in cost.nominal if name != BASELINE and cost.nominal[name])


def phases(cost: StepCost, seconds: Mapping[str, float]) -> list[tuple[Mapping[str, float], float]]:
    """What was measured, as nominal seconds by class and seconds. Greedy samples are drawn beside the others: both are
    one measurement."""
    nominal = {name: dict(classes) for name, classes in cost.nominal.items()}
    for name, amount in nominal.pop(BASELINE, {}).items():
        nominal["rollouts"][name] = nominal["rollouts"].get(name, 0.0) + amount
    return [(classes, seconds[name]) for name, classes in nominal.items() if classes]


def observed(pilot: Pilot) -> Observed:
    """The signals of the step that was measured last."""
    assert pilot.measured is not None
    measured, calibration = pilot.measured, pilot.calibration
    values = {LENGTH: measured.workload.prompt + measured.workload.response}
    taken = shares(pilot)
    for name in calibration.classes:
        factor, spread = calibration.factor(name)
        if spread <= KNOWN * factor and taken.get(name, 0.0) >= COUNTS:
            values[EFFICIENCY + name] = 1 / factor
    used = device_bytes(pilot.plan, pilot.job.shapes)
    here = [device for device in used if device in measured.usable]
    misfits = frozenset(device for device in here if used[device] > measured.cluster.budget(device))
    return Observed(measured.step, measured.usable, values, misfits)


def shares(pilot: Pilot) -> Mapping[str, float]:
    """The share of the tasks' seconds, as predicted, that each class of operations takes."""
    found: dict[str, float] = {}
    for nominal in pilot.cost.nominal.values() if pilot.cost is not None else ():
        for name, seconds in nominal.items():
            found[name] = found.get(name, 0.0) + seconds / pilot.calibration.efficiency(name)
    total = sum(found.values())
    return {name: seconds / total for name, seconds in found.items()} if total else {}


def looked(pilot: Pilot) -> Pilot:
    """After a replan, whatever came of it."""
    now = observed(pilot)
    return replace(pilot, drift=Drift(now) if pilot.drift is None else replanned(pilot.drift, now))


def moved(pilot: Pilot, plan: Plan) -> Pilot:
    """Another plan is in force."""
    return replace(pilot, plan=plan, steps=0, measured=None, cost=None)


def predicted(pilot: Pilot) -> StepCost | None:
    """Of the plan in force, as things are now; None where it cannot go on."""
    assert pilot.measured is not None
    if pilot.urgent:
        return None
    return step_cost(pilot.job, pilot.plan, pilot.measured.cluster, pilot.calibration)


def targets(pilot: Pilot, pinned: Sequence[ModelStage] = (), near: float = NEAR) -> list[Found]:
    """The best plan, and of those that leave one model-stage where it is the best that are nearly as good: their moves
    are cheaper. ResourceExhausted where no plan fits."""
    assert pilot.measured is not None
    asked = Question(
        pilot.job,
        pilot.measured.cluster,
        {name: (stage,) for name, stage in pilot.plan.stages},
        pilot.calibration,
        pilot.plan.staleness,
        pilot.measured.usable,
        {name: pilot.plan[name] for name in pinned},
        pilot.plan,
        pilot.widths,
    )
    best = search(asked, TARGETS).found
    found = {one.plan: one for one in best}
    for name in pilot.plan.names:
        try:
            kept = search(replace(asked, pinned={**asked.pinned, name: pilot.plan[name]})).found[0]
        except NereusError:
            continue  # it cannot stay
        found.setdefault(kept.plan, kept)
    close = [one for one in found.values() if one.cost.seconds <= (1 + near) * best[0].cost.seconds]
    others = [one for one in close if one.plan != pilot.plan]
    return sorted(others, key=lambda one: one.cost.seconds)[:TARGETS]
