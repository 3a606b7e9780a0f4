"""What a model-stage can be on so many devices: memory against time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import ModelStage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.planning.calibration import Calibration
from nereus_common.planning.demand import Demand
from nereus_common.planning.frontier import undominated
from nereus_common.planning.job import Job, sync_demand, task_demand
from nereus_common.planning.memory import footprints
from nereus_common.planning.moments import Matrix, Moments
from nereus_common.planning.placements import Column, Placements

Indices = NDArray[np.intp]
IMPOSSIBLE = 1e30
"""Seconds of what cannot be: finite, so that it can be reckoned with."""


class Pick(NamedTuple):
    """A row of `Placements` under knobs."""

    placements: Placements
    row: int
    knobs: StagePlan


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """All placements of one model-stage, row by row: devices `used` [N], `memory` [N] in bytes of the fullest rank,
    `seconds` [N, moments]."""

    variants: Sequence[tuple[Placements, StagePlan]]
    used: NDArray[np.int64]
    memory: Column
    seconds: Matrix

    @classmethod
    def of(
        cls,
        job: Job,
        name: ModelStage,
        variants: Sequence[tuple[Placements, StagePlan]],
        moments: Moments,
        calibration: Calibration,
    ) -> StageOptions:
        tables = [_seconds(job, name, placements, moments, calibration) for placements, _ in variants]
        used = [placed.tp * placed.pp * placed.fs * placed.replicas for placed, _ in variants]
        return cls(
            variants,
            np.concatenate(used).astype(np.int64),
            np.concatenate([footprints(placed).total for placed, _ in variants]),
            np.concatenate(tables),
        )

    def only(self, layout: Layout, replicas: int, devices: int) -> StageOptions:
        """All other rows fit nowhere, and none does where there are fewer `devices`."""
        degrees = np.array([layout.tp, layout.pp, layout.fs, replicas])
        rows = [np.stack([placed.tp, placed.pp, placed.fs, placed.replicas], axis=1) for placed, _ in self.variants]
        other = (np.concatenate(rows) != degrees).any(axis=1)
        return replace(self, memory=np.where(other | (self.used > devices), np.inf, self.memory))

    def within(self, widths: Collection[int]) -> StageOptions:
        """Rows of another tensor-parallel degree fit nowhere."""
        other = ~np.isin(np.concatenate([placed.tp for placed, _ in self.variants]), list(widths))
        return replace(self, memory=np.where(other, np.inf, self.memory))

    def pick(self, row: int) -> Pick:
        for placements, knobs in self.variants:
            if row < len(placements.tp):
                return Pick(placements, row, knobs)
            row -= len(placements.tp)
        raise IndexError(row)

    def fastest(self, levels: Sequence[int], budget: float) -> Matrix:
        """[levels + 1, moments]: the least of every moment on no device, and on at most so many as each of `levels`."""
        fits = self.memory <= budget
        found = np.full((len(levels) + 1, self.seconds.shape[1]), IMPOSSIBLE)
        for number, level in enumerate(levels, start=1):
            rows = fits & (self.used <= level)
            found[number] = self.seconds[rows].min(axis=0, initial=IMPOSSIBLE)
        return found

    def fronts(self, levels: Sequence[int], budget: float, slack: float) -> list[Indices]:
        """For each of the ascending `levels`, the rows on at most so many devices that fit `budget` and that no other
        such row beats in memory and in time."""
        costs = np.concatenate([self.memory[:, None], self.seconds], axis=1)
        fits = self.memory <= budget
        found, front, before = [], np.zeros(0, np.intp), 0
        for level in levels:
            new = np.flatnonzero(fits & (self.used > before) & (self.used <= level))
            rows = np.concatenate([front, new])
            front, before = rows[undominated(costs[rows], slack)], level
            found.append(front)
        return found


def _seconds(job: Job, name: ModelStage, placements: Placements, moments: Moments, calibration: Calibration) -> Matrix:
    seconds = np.zeros((len(placements.tp), moments.count))
    for task in job.workflow.tasks:
        if task.stage == name:
            seconds[:, moments.of_task[task.name]] += _predicted(task_demand(job, task, placements), calibration)
    if job.is_synced(name):
        seconds[:, -1] += _predicted(sync_demand(placements), calibration)
    return seconds


def _predicted(demand: Demand, calibration: Calibration) -> Column | float:
    return sum((seconds / calibration.efficiency(name) for name, seconds in demand.items()), start=0.0)
