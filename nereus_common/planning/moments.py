"""The length of many steps at once: the rules of `step_time`, over columns.

A step's seconds are told by moment: one for each wave in which something takes time, in their order, and at last the
weight sync. What stands on other devices joins a wave side by side, and the weight sync one after the other; where
everything computes on the cores of one node, all take turns in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.workflow import Work
from nereus_common.planning.job import Job

Matrix = NDArray[np.float64]
"""Rows of seconds by moment."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """`of_task`: the moment of each task. `elsewhere` [moments]: seconds of what runs beside the devices. `sampling`:
    the moment in which responses are sampled, where that overlaps with all others. `turns`: all take turns."""

    of_task: Mapping[str, int]
    elsewhere: NDArray[np.float64]
    sampling: int | None
    turns: bool

    @classmethod
    def of(cls, job: Job, *, asynchronous: bool, turns: bool) -> Moments:
        waves = [
            wave for wave in job.workflow.waves() if any(task.stage or task.name in job.elsewhere for task in wave)
        ]
        beside = [max((job.elsewhere.get(task.name, 0.0) for task in wave), default=0.0) for wave in waves]
        of_task = {task.name: moment for moment, wave in enumerate(waves) for task in wave}
        first = next(of_task[task.name] for task in job.workflow.tasks if task.work is Work.SAMPLE)
        return cls(of_task, np.array([*beside, 0.0]), first if asynchronous else None, turns)

    @property
    def count(self) -> int:
        return len(self.elsewhere)

    def join(self, first: Matrix, second: Matrix) -> Matrix:
        """Of what stands on other devices."""
        joined = first + second
        if not self.turns:
            joined[..., :-1] = np.maximum(first[..., :-1], second[..., :-1])
        return joined

    def total(self, seconds: Matrix) -> NDArray[np.float64]:
        """From one version to the next, by row."""
        waves = np.maximum(seconds, self.elsewhere)[..., :-1]
        everything, sync = waves.sum(axis=-1), seconds[..., -1]
        if self.sampling is None:
            return np.asarray(everything + sync)
        sampled = seconds[..., self.sampling]
        longer = np.maximum(sampled, everything - waves[..., self.sampling])
        busiest = seconds[..., :-1].sum(axis=-1) if self.turns else longer
        return np.asarray(np.maximum(longer, busiest) + sync)
