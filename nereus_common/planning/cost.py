"""What a step of a job takes under a plan, as far as the hardware's efficiencies are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.core.plan import Plan
from nereus_common.core.workflow import Task, Work, Workflow
from nereus_common.planning.calibration import Calibration, Nominal, Prediction
from nereus_common.planning.demand import Demand, generation, inference, pull, training
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.placements import Placements
from nereus_common.planning.step_time import StepTime, place_of, step_time
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

SYNC = "sync"


@dataclass(frozen=True, slots=True)
class Job:
    """What of a job does not depend on its plan. `shapes`: by model, as its model-stages compute with it. `elsewhere`:
    seconds of tasks that run beside the devices, as measured: reward functions and environments."""

    workflow: Workflow
    shapes: Mapping[ModelStage, ModelShape]
    workload: Workload
    elsewhere: Mapping[str, float]


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
    nominal = {task.name: _nominal(job, plan, cluster, task) for task in job.workflow.tasks if task.stage is not None}
    nominal[SYNC] = _sync(job, plan, cluster)
    tasks = {name: calibration.predict(asked) for name, asked in nominal.items()}
    seconds = dict(job.elsewhere) | {name: task.seconds for name, task in tasks.items()}
    places = {name: frozenset(map(place_of, stage.devices)) for name, stage in plan.stages}
    sync = seconds.pop(SYNC)
    time = step_time(job.workflow, seconds, places, sync, asynchronous=plan.staleness is not None)
    return StepCost(time, tasks, nominal)


def _nominal(job: Job, plan: Plan, cluster: Cluster, task: Task) -> Nominal:
    assert task.stage is not None
    placements, workload = _placed(job, plan, cluster, task.stage), job.workload
    if task.work is Work.UPDATE:
        return _first(training(placements, workload))
    if task.work is Work.SAMPLE:
        greedy = task.name == "baseline"
        return _first(generation(placements, replace(workload, samples=1) if greedy else workload))
    scored = replace(workload, minibatches=1, epochs=1)
    return _first(inference(placements, scored))


def _sync(job: Job, plan: Plan, cluster: Cluster) -> Nominal:
    """Every unit of a trained model that does not train is filled anew, one model after the other."""
    found: dict[str, float] = {}
    for name in plan.names:
        if name.model in job.workflow.trained and name.stage is not Stage.TRAINING:
            placements = _placed(job, plan, cluster, name)
            asked = _first(pull(placements, placements.held * placements.item))
            found = {key: found.get(key, 0.0) + asked.get(key, 0.0) for key in found.keys() | asked.keys()}
    return found


def _placed(job: Job, plan: Plan, cluster: Cluster, name: ModelStage) -> Placements:
    return Placements.of(job.shapes[name], name, [plan[name]], cluster)


def _first(demand: Demand) -> Nominal:
    return {name: float(column[0]) for name, column in demand.items() if column[0]}
