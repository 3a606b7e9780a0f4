"""What a step of a job takes under a plan, as far as the hardware's efficiencies are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_common.core.ids import ModelStage
from nereus_common.core.plan import Plan
from nereus_common.planning.calibration import Calibration, Nominal, Prediction
from nereus_common.planning.demand import Demand
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.job import SYNC, Job, sync_demand, task_demand
from nereus_common.planning.placements import Placements
from nereus_common.planning.step_time import StepTime, place_of, step_time


@dataclass(frozen=True, slots=True)
class StepCost:
    """`tasks`: a prediction by task, and one for SYNC; `nominal`: what each of them was predicted from."""

    time: StepTime
    tasks: Mapping[str, Prediction]
    nominal: Mapping[str, Nominal]

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def confidence(self) -> float:
        """Of the task that the least is known of."""
        return min((task.confidence for task in self.tasks.values()), default=0.0)


def step_cost(job: Job, plan: Plan, cluster: Cluster, calibration: Calibration) -> StepCost:
    """Raises what `Placements.of` raises, and KeyError for a model-stage without a shape."""
    placed = {name: Placements.of(job.shapes[name], name, [stage], cluster) for name, stage in plan.stages}
    nominal = {
        task.name: _first(task_demand(job, task, placed[task.stage]))
        for task in job.workflow.tasks
        if task.stage is not None
    }
    nominal[SYNC] = _sync(job, placed)
    tasks = {name: calibration.predict(asked) for name, asked in nominal.items()}
    seconds = dict(job.elsewhere) | {name: task.seconds for name, task in tasks.items()}
    places = {name: frozenset(map(place_of, stage.devices)) for name, stage in plan.stages}
    sync = seconds.pop(SYNC)
    time = step_time(job.workflow, seconds, places, sync, asynchronous=plan.staleness is not None)
    return StepCost(time, tasks, nominal)


def _sync(job: Job, placed: Mapping[ModelStage, Placements]) -> Nominal:
    """One model-stage after the other."""
    found: dict[str, float] = {}
    for name, placements in placed.items():
        if job.is_synced(name):
            for key, seconds in _first(sync_demand(placements)).items():
                found[key] = found.get(key, 0.0) + seconds
    return found


def _first(demand: Demand) -> Nominal:
    return {name: float(column[0]) for name, column in demand.items() if column[0]}
