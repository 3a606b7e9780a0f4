"""Intervals for measured accuracies."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Proportion:
    """A mean of `n` scores in [0, 1] with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int

    def apart_from(self, other: Proportion) -> bool:
        """Whether the two intervals do not touch."""
        return self.high < other.low or other.high < self.low


def wilson(total: float, n: int, z: float = Z95) -> Proportion:
    """Wilson's score interval (Wilson 1927) of `total` successes in `n` trials; partial credit counts as it is."""
    if n < 1:
        return Proportion(0.0, 0.0, 1.0, 0)
    mean = total / n
    scale = 1 + z * z / n
    centre = (mean + z * z / (2 * n)) / scale
    reach = z / scale * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return Proportion(mean, max(0.0, centre - reach), min(1.0, centre + reach), n)
