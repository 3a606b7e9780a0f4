"""Choices that none of the others beats in everything."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def undominated(costs: NDArray[np.float64], slack: float = 0.0) -> NDArray[np.intp]:
    """Rows of `costs` [N, K], none negative, than which no other one that is returned is as low in every column; of
    equal rows one. `slack`: those are left out too that are better by no more than this share. Ascending by sum."""
    if len(costs) < 2:
        return np.arange(len(costs))
    scaled = costs / np.maximum(costs.max(axis=0), 1e-300)
    left = np.argsort(scaled.sum(axis=1), kind="stable")
    ordered, found = scaled[left], []
    while len(left):
        found.append(left[0])
        kept = (ordered < (1 - slack) * ordered[0]).any(axis=1)
        left, ordered = left[kept], ordered[kept]
    return np.array(found, np.intp)
