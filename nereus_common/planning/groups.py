"""What a group of model-stages that share devices can be: they take turns, and their memory adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.planning.bounds import Bounds
from nereus_common.planning.frontier import undominated
from nereus_common.planning.moments import Matrix
from nereus_common.planning.options import Indices, StageOptions


@dataclass(frozen=True, slots=True, eq=False)
class PoolOptions:
    """All model-stages on the devices of one pool. `fronts`: by model-stage and level, the rows of its options that
    are looked at; `left`, by level: devices of all pools that a group on so many leaves to the others."""

    stages: Sequence[StageOptions]
    fronts: Sequence[Sequence[Indices]]
    levels: Sequence[int]
    left: Sequence[NDArray[np.int64]]
    budget: float
    bounds: Bounds

    def group(self, members: Sequence[int]) -> GroupOptions:
        tables = [self._together(members, number) for number in range(len(self.levels))]
        used = np.repeat(np.array(self.levels, np.int64), [len(seconds) for seconds, _ in tables])
        seconds, rows = (np.concatenate(side) for side in zip(*tables, strict=True))
        best = undominated(np.concatenate([used[:, None], seconds], axis=1), self.bounds.slack)
        return GroupOptions(used[best], seconds[best], rows[best])

    def _together(self, members: Sequence[int], level: int) -> tuple[Matrix, Indices]:
        """Seconds and rows of the combinations that fit and that none beats in time."""
        others = [number for number in range(len(self.stages)) if number not in members]
        rest = self.bounds.rest(others, self.left[level][None])
        tables = [self._table(member, level) for member in members]
        least = [table.min(axis=0, initial=np.inf) for table in tables]
        costs, rows = np.zeros((1, 1 + self.bounds.moments.count)), np.zeros((1, 0), np.intp)
        for number, (member, table) in enumerate(zip(members, tables, strict=True)):
            summed = (costs[:, None] + table[None]).reshape(-1, costs.shape[1])
            kept = self._kept(summed, sum(least[number + 1 :], start=np.zeros(costs.shape[1])), rest)
            before, row = np.divmod(kept, max(1, len(table)))
            costs, rows = summed[kept], np.concatenate([rows[before], self.fronts[member][level][row, None]], axis=1)
        best = undominated(costs[:, 1:], self.bounds.slack)
        return costs[best, 1:], rows[best]

    def _table(self, member: int, level: int) -> Matrix:
        """[N, 1 + moments]: memory and seconds of what is looked at."""
        stage, front = self.stages[member], self.fronts[member][level]
        return np.concatenate([stage.memory[front, None], stage.seconds[front]], axis=1)

    def _kept(self, costs: Matrix, coming: NDArray[np.float64], rest: Matrix) -> Indices:
        """Rows that fit and may win, where the group's other members add no less than `coming`."""
        if not np.isfinite(coming).all():
            return np.zeros(0, np.intp)
        least = costs + coming
        kept = np.flatnonzero(least[:, 0] <= self.budget)
        kept = kept[self.bounds.may_win(least[kept, 1:], rest)]
        return kept[undominated(costs[kept], self.bounds.slack)]


@dataclass(frozen=True, slots=True, eq=False)
class GroupOptions:
    """`seconds` [N, moments] on `used` [N] devices, and the row of each member in its `StageOptions`, `rows`
    [N, members]."""

    used: NDArray[np.int64]
    seconds: Matrix
    rows: Indices
