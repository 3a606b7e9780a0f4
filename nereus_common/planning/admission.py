"""Whether a target is worth its transition, and which one is taken (the paper's §4.3, Eq. 2).

    opportunistic   ΔL > 0 and L_tran / ΔL ≤ γ·H      the best target first, then those nearly as good
    urgent          the plan in force cannot be kept: the first target that can be reached

ΔL: seconds a step that the target saves; L_tran: seconds that its transition costs the job; H: steps until the signal
that drifted is expected to cross its threshold again. γ = 0 admits what is urgent only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nereus_common.core.errors import InvalidInput
from nereus_common.core.plan import Plan

GAMMA = 0.5
"""γ: the share of the horizon in which a transition has to pay for itself."""
NEAR = 0.05
"""How much slower a step than the best target's a cheaper target may make it."""


class Verdict(StrEnum):
    TAKEN = "taken"
    UNREACHABLE = "unreachable"
    """No order of its transition fits memory."""
    SAVES_NOTHING = "saves nothing"
    TOO_DEAR = "too dear"
    """Its payback is longer than γ·H."""
    TOO_SLOW = "too slow"
    """Further from the best target than NEAR."""
    NOT_NEEDED = "not needed"
    """One before it was taken."""


@dataclass(frozen=True, slots=True)
class Target:
    """A plan that fits memory. `step_seconds` as predicted; `transition_seconds` of the move there, along its critical
    path, None where there is no way: `why` says what is lacking."""

    plan: Plan
    step_seconds: float
    transition_seconds: float | None
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "transition_seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"target {self.plan.id}: {name} is {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class Weighed:
    """`saving`: ΔL in seconds a step. `payback`: steps until the move has paid for itself, infinite where it never
    does."""

    target: Target
    verdict: Verdict
    saving: float
    payback: float


@dataclass(frozen=True, slots=True)
class Decision:
    """`taken`: None keeps the plan in force, or, where that cannot be kept, leaves a checkpoint and a restart."""

    taken: Target | None
    weighed: tuple[Weighed, ...]
    horizon: float
    gamma: float
    urgent: bool

    @property
    def limit(self) -> float:
        """γ·H in steps."""
        return self.gamma * self.horizon


def admit(
    step_seconds: float | None,
    targets: Sequence[Target],
    *,
    horizon: float,
    gamma: float = GAMMA,
    near: float = NEAR,
    urgent: bool = False,
) -> Decision:
    """Weigh `targets` from the fastest step to the slowest against the plan in force.

    `step_seconds`: predicted for the plan in force as things are now; None where it cannot run any more, which only an
    urgent decision may say.
    """
    _check(step_seconds, horizon, gamma, near, urgent)
    ordered = sorted(targets, key=lambda target: target.step_seconds)
    taken: Target | None = None
    weighed = []
    for target in ordered:
        saving = math.inf if step_seconds is None else step_seconds - target.step_seconds
        payback = _payback(target, saving)
        if taken is not None:
            verdict = Verdict.NOT_NEEDED
        elif target.transition_seconds is None:
            verdict = Verdict.UNREACHABLE
        elif urgent:
            verdict = Verdict.TAKEN
        elif target.step_seconds > (1 + near) * ordered[0].step_seconds:
            verdict = Verdict.TOO_SLOW
        elif saving <= 0:
            verdict = Verdict.SAVES_NOTHING
        else:
            verdict = Verdict.TAKEN if gamma and payback <= gamma * horizon else Verdict.TOO_DEAR
        if verdict is Verdict.TAKEN:
            taken = target
        weighed.append(Weighed(target, verdict, saving, payback))
    return Decision(taken, tuple(weighed), horizon, gamma, urgent)


def _payback(target: Target, saving: float) -> float:
    if target.transition_seconds is None or saving <= 0:
        return math.inf
    return target.transition_seconds / saving


def _check(step_seconds: float | None, horizon: float, gamma: float, near: float, urgent: bool) -> None:
    if step_seconds is None and not urgent:
        raise InvalidInput("a plan without a predicted step cannot be compared with", field="step_seconds")
    given = {"step_seconds": step_seconds, "horizon": horizon, "gamma": gamma, "near": near}
    for name, value in given.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"{name} is {value!r}", remedy="a number that is not negative", field=name)
    if gamma > 1:
        raise InvalidInput(f"gamma is {gamma}", remedy="between 0, which admits nothing, and 1", field="gamma")
