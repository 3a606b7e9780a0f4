"""The plan of a job that names none: a fixed, small rule, not a search.

One device: all model-stages share it, in the order in which a step needs them. More: the first half of the devices,
rounded up, each hold a generation replica; on the rest the trained model stands once, sharded over them (fs), and each
frozen model once per device, sharing it with training.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan


def default_plan(
    devices: Sequence[DeviceId], model_stages: Sequence[ModelStage], limits: GenerationLimits | None = None
) -> Plan:
    """Place `model_stages` on `devices`, taken in the order given; InvalidPlan when there is none."""
    if not devices:
        raise InvalidPlan("there is no device to place a job on", remedy="declare devices", field="plan")
    split = (len(devices) + 1) // 2
    generating = tuple(devices[:split])
    learning = tuple(devices[split:]) or generating
    stages = {name: _stage(name, generating, learning, limits or GenerationLimits()) for name in model_stages}
    return Plan(tuple(stages.items()), _shared(stages))


def _stage(
    name: ModelStage, generating: tuple[DeviceId, ...], learning: tuple[DeviceId, ...], limits: GenerationLimits
) -> StagePlan:
    match name.stage:
        case Stage.GENERATION:
            return StagePlan(Layout(), generating, len(generating), generation=limits)
        case Stage.INFERENCE:
            return StagePlan(Layout(), learning, len(learning))
        case Stage.TRAINING:
            return StagePlan(Layout(fs=len(learning)), learning)


def _shared(stages: dict[ModelStage, StagePlan]) -> tuple[tuple[ModelStage, ...], ...]:
    """One group per set of model-stages that share a device, in the order of their phases."""
    order = {stage: rank for rank, stage in enumerate(Stage)}
    groups: dict[frozenset[DeviceId], list[ModelStage]] = {}
    for name in sorted(stages, key=lambda name: (order[name.stage], name.model)):
        groups.setdefault(frozenset(stages[name].devices), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
