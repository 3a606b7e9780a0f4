"""What a search is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.planning.calibration import Calibration
from nereus_common.planning.cost import StepCost
from nereus_common.planning.hardware import Cluster
from nereus_common.planning.job import Job


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is sought for.

    `knobs`: for each model-stage what may be chosen beside layout and devices; only one for what may not. `usable`: the
    devices of the cluster that may be used, by default all. `pinned`: model-stages that keep their layout and replicas.
    `present`: the plan in force, whose devices are kept where nothing is lost by it. `widths`: of model-stages whose
    engines run no others, the tensor-parallel degrees.
    """

    job: Job
    cluster: Cluster
    knobs: Mapping[ModelStage, tuple[StagePlan, ...]]
    calibration: Calibration = field(default_factory=Calibration)
    staleness: int | None = None
    usable: frozenset[DeviceId] | None = None
    pinned: Mapping[ModelStage, StagePlan] = field(default_factory=dict)
    present: Plan | None = None
    widths: Mapping[ModelStage, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    plan: Plan
    cost: StepCost


@dataclass(frozen=True, slots=True)
class Searched:
    """The best plans, best first. `space`: how many placements of single model-stages were priced."""

    found: tuple[Found, ...]
    space: int
