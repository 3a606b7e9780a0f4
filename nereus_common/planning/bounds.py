"""What a search need not look at: choices that cannot be part of a plan that is as good as one already known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.planning.moments import Matrix, Moments


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """`levels`: ascending numbers of devices, by pool. `fastest` [levels + 1, model-stages, moments], by pool: the
    least that each model-stage takes on no more devices. `seconds`: of a step under the plan sought, at most. `slack`:
    see `frontier`."""

    moments: Moments
    levels: Sequence[Sequence[int]]
    fastest: Sequence[NDArray[np.float64]]
    seconds: float = np.inf
    slack: float = 0.0

    def rest(self, members: Sequence[int], left: NDArray[np.int64]) -> Matrix:
        """[N, moments]: what these model-stages take at least, on the devices that are `left` [N, pools]."""
        if not members:
            return np.zeros((len(left), self.moments.count))
        by_pool = [
            fastest[np.searchsorted(levels, left[:, pool], side="right")][:, list(members)]
            for pool, (levels, fastest) in enumerate(zip(self.levels, self.fastest, strict=True))
        ]
        least = np.minimum.reduce(by_pool)
        together = least.sum(axis=1)
        if not self.moments.turns:
            together[:, :-1] = least[:, :, :-1].max(axis=1)
        return np.asarray(together)

    def may_win(self, seconds: Matrix, rest: Matrix) -> NDArray[np.bool_]:
        """By row: whether a plan in which these are the `seconds` of some model-stages, and `rest` those of the others,
        can stay within the bound."""
        return np.asarray(self.moments.total(self.moments.join(seconds, rest)) <= self.seconds)
