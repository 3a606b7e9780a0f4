"""What the hardware achieves, learned from the running job: one efficiency for each class of operations.

The seconds of a phase are a sum over classes c of n_c / e_c: n_c is what the phase's operations of that class take at
nominal peaks, e_c ≤ 1 the share of the peak that they achieve. So measured phases are linear equations in the factors
f_c = 1 / e_c, and the factors are estimated from them by Bayesian linear regression: each starts at a conservative
value with a wide spread, and every measured phase narrows those that it depends on. (C. M. Bishop, Pattern Recognition
and Machine Learning, §3.3.) Phases that were measured long ago count less, because efficiencies drift.

Errors of measured times grow with the times: all is weighted by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput

Nominal = Mapping[str, float]
"""Class → seconds at nominal peaks."""
Matrix = NDArray[np.float64]

PRIOR_FACTOR, PRIOR_SPREAD = 3.0, 3.0
"""A class that was never measured achieves a third of its peak, give or take as much."""
NOISE = 0.05
"""Relative standard deviation of a measured phase around what the classes can explain."""
MEMORY = 0.98
"""What a measurement counts for, relative to the one after it."""
FIRST = 3
"""Phases of a class that may throw over what was thought of it."""
LEAST_FACTOR = 1e-3
"""Factors are positive, and below one only where a nominal peak is stated too low, as that of a CPU may be."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """`spread`: one standard deviation, of what is not known about the factors and of single phases together."""

    seconds: float
    spread: float

    @property
    def confidence(self) -> float:
        """From 0, nothing is known, to 1."""
        return 1 / (1 + self.spread / self.seconds) if self.seconds else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A value; `after` gives the next one. By place in `classes`: `factors`, `covariance`, and in how many phases each
    was `seen`."""

    classes: tuple[str, ...] = ()
    factors: Matrix = field(default_factory=lambda: np.zeros(0))
    covariance: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    seen: Matrix = field(default_factory=lambda: np.zeros(0))

    def efficiency(self, name: str) -> float:
        return 1 / self._factor(name)

    def factor(self, name: str) -> tuple[float, float]:
        """Seconds for a nominal second, and one standard deviation of that."""
        if name not in self.classes:
            return PRIOR_FACTOR, PRIOR_SPREAD
        place = self.classes.index(name)
        return float(self.factors[place]), math.sqrt(max(float(self.covariance[place, place]), 0.0))

    def predict(self, nominal: Nominal) -> Prediction:
        _check(nominal)
        known = self._with(nominal)
        row = known._row(nominal)
        seconds = float(row @ known.factors)
        variance = float(row @ known.covariance @ row)
        return Prediction(seconds, math.sqrt(max(variance, 0.0) + (NOISE * seconds) ** 2))

    def after(self, nominal: Nominal, seconds: float) -> Calibration:
        """What is known once a phase of these operations was measured to take `seconds`.

        InvalidInput where that is no duration: nothing is learned from a broken clock or a missing measurement.
        """
        _check(nominal)
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidInput(
                f"a phase that took {seconds!r} s", remedy="leave out what was not measured", field="seconds"
            )
        known = self._with(nominal)
        row = known._row(nominal) / seconds
        if not row.any():
            return known
        spread = known._open_minded(row) / MEMORY
        gain = spread @ row / (row @ spread @ row + NOISE**2)
        factors = np.maximum(known.factors + gain * (1 - row @ known.factors), LEAST_FACTOR)
        covariance = spread - np.outer(gain, row @ spread)
        symmetric = _bounded((covariance + covariance.T) / 2, factors)
        return Calibration(known.classes, factors, symmetric, known.seen + (row > 0))

    def _open_minded(self, row: Matrix) -> Matrix:
        """The covariance before a phase. The first phases of a class say where it lies at all, and may contradict the
        prior by orders of magnitude, where later ones that are far off are more likely to have been disturbed."""
        if self.seen[row > 0].min() >= FIRST:
            return self.covariance
        unsure, wrong = float(row @ self.covariance @ row), float(1 - row @ self.factors)
        wider: Matrix = self.covariance * max(1.0, wrong**2 / max(unsure, NOISE**2))
        return wider

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "classes": list(self.classes),
            "factors": self.factors.tolist(),
            "covariance": self.covariance.tolist(),
            "seen": self.seen.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """InvalidInput for what `to_dict` cannot have written."""
        size = len(data["classes"])
        factors, covariance = np.array(data["factors"], float), np.array(data["covariance"], float).reshape(size, size)
        seen = np.array(data["seen"], float)
        numbers = np.concatenate([factors, seen, covariance.ravel()])
        if not factors.shape == seen.shape == (size,) or not np.isfinite(numbers).all():
            raise InvalidInput("this is no calibration", remedy="delete it: a job starts without", field="factors")
        return cls(tuple(data["classes"]), factors, covariance, seen)

    def _factor(self, name: str) -> float:
        return float(self.factors[self.classes.index(name)]) if name in self.classes else PRIOR_FACTOR

    def _with(self, nominal: Nominal) -> Calibration:
        """Classes that were never seen join, known by nothing but the prior."""
        new = sorted(nominal.keys() - set(self.classes))
        if not new:
            return self
        size = len(self.classes)
        covariance = np.diag(np.full(size + len(new), PRIOR_SPREAD**2))
        covariance[:size, :size] = self.covariance
        factors = np.concatenate([self.factors, np.full(len(new), PRIOR_FACTOR)])
        seen = np.concatenate([self.seen, np.zeros(len(new))])
        return Calibration((*self.classes, *new), factors, covariance, seen)

    def _row(self, nominal: Nominal) -> Matrix:
        return np.array([nominal.get(name, 0.0) for name in self.classes])


def _bounded(covariance: Matrix, factors: Matrix) -> Matrix:
    """Forgetting lets the spread of a class that is not measured grow; it never grows beyond that of a new one, or what
    its factor is."""
    wide = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.minimum(1.0, np.maximum(PRIOR_SPREAD, factors) / np.maximum(wide, 1e-12))
    bounded: Matrix = covariance * np.outer(scale, scale)
    return bounded


def _check(nominal: Nominal) -> None:
    for name, amount in nominal.items():
        if not (math.isfinite(amount) and amount >= 0):
            raise InvalidInput(f"operations of class {name} take {amount!r} s at their peak", field=name)


def calibrated(measured: Sequence[tuple[Nominal, float]]) -> Calibration:
    """After all of these phases, in their order."""
    calibration = Calibration()
    for nominal, seconds in measured:
        calibration = calibration.after(nominal, seconds)
    return calibration
