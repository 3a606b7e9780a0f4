"""A job as planning sees it: what a step of it asks of the hardware, whatever its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.core.workflow import Task, Work, Workflow
from nereus_common.planning.demand import Demand, generation, inference, pull, training
from nereus_common.planning.placements import Placements
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

SYNC = "sync"
"""What follows the tasks: every unit of a trained model that does not train is filled anew."""
BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Job:
    """`shapes`: of the models, as their model-stages compute with them. `elsewhere`: seconds of tasks that run beside
    the devices, as measured: reward functions and environments."""

    workflow: Workflow
    shapes: Mapping[ModelStage, ModelShape]
    workload: Workload
    elsewhere: Mapping[str, float]

    def is_synced(self, name: ModelStage) -> bool:
        """Whether its units get new weights in every step."""
        return name.model in self.workflow.trained and name.stage is not Stage.TRAINING


def task_demand(job: Job, task: Task, placements: Placements) -> Demand:
    """Of a task on these placements of its model-stage."""
    if task.work is Work.UPDATE:
        return training(placements, job.workload)
    if task.work is Work.SAMPLE:
        greedy = replace(job.workload, samples=1) if task.name == BASELINE else job.workload
        return generation(placements, greedy)
    return inference(placements, replace(job.workload, minibatches=1, epochs=1))


def sync_demand(placements: Placements) -> Demand:
    return pull(placements, placements.held * placements.item)
