"""Intervals for measured accuracies and rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `n` scores with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int

    def apart_from(self, other: Estimate) -> bool:
        """Whether the two intervals do not touch."""
        return self.high < other.low or other.high < self.low


def wilson(total: float, n: int, z: float = Z95) -> Estimate:
    """Wilson's score interval (Wilson 1927) of `total` successes in `n` trials; partial credit counts as it is."""
    if n < 1:
        return Estimate(0.0, 0.0, 1.0, 0)
    mean = total / n
    scale = 1 + z * z / n
    centre = (mean + z * z / (2 * n)) / scale
    reach = z / scale * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return Estimate(mean, max(0.0, centre - reach), min(1.0, centre + reach), n)


def confidence(scores: NDArray[np.float32], z: float = Z95) -> Estimate:
    """The mean of any scores: Wilson's interval where all lie in [0, 1], else the normal one."""
    values = scores.astype(np.float64)
    if not len(values) or (values.min() >= 0 and values.max() <= 1):
        return wilson(float(values.sum()), len(values), z)
    reach = z * float(values.std()) / math.sqrt(len(values))
    mean = float(values.mean())
    return Estimate(mean, mean - reach, mean + reach, len(values))
