"""Learning rate by step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup: int, steps: int) -> float:
    """The rate of update `step`, counted from 0, of `steps` in all.

    The rate climbs in equal parts over the first `warmup` updates, the last of which has the peak. From there it stays,
    or falls towards 0, which it would reach at update `steps`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
