"""The plan of a job that names none: a fixed, small rule, not a search.

One device: all model-stages share it, in the order in which a step needs them. More: up to half of the devices,
rounded up, each hold a generation replica, and on the rest the job learns. One trained model stands there once, sharded
over these devices (fs), and shares them with the only inference model, if there is one, of which each holds a replica.
With more models, as in PPO, no device has room for all: each trained model, and all inference models together, take
devices of their own, as far as there are enough; model-stages that share a device take smaller microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan

MICROBATCH, SHARED_MICROBATCH = 2048, 1024
"""Tokens, on devices of its own and where model-stages share them: the activations of all of them must fit."""

Devices = tuple[DeviceId, ...]
Group = tuple[ModelStage, ...]


def default_plan(
    devices: Sequence[DeviceId], model_stages: Sequence[ModelStage], limits: GenerationLimits | None = None
) -> Plan:
    """Place `model_stages` on `devices`, taken in the order given; InvalidPlan when there is none."""
    if not devices:
        raise InvalidPlan("there is no device to place a job on", remedy="declare devices", field="plan")
    tenants = _tenants(model_stages)
    learning = min(len(devices) - 1, max(len(devices) // 2, len(tenants))) if tenants else 0
    split = len(devices) - learning
    generating = tuple(devices[:split])
    places = dict.fromkeys((name for name in model_stages if name.stage is Stage.GENERATION), generating)
    for tenant, share in zip(tenants, _shares(tuple(devices[split:]) or generating, len(tenants)), strict=True):
        places |= dict.fromkeys(tenant, share)
    shared = _shared(places)
    crowded = {name for group in shared for name in group}
    stages = {
        name: _stage(name, places[name], SHARED_MICROBATCH if name in crowded else MICROBATCH, limits)
        for name in model_stages
    }
    return Plan(tuple(stages.items()), shared)


def _tenants(model_stages: Sequence[ModelStage]) -> list[Group]:
    """The model-stages that learn, grouped by the devices they are to share."""
    trained = sorted(name for name in model_stages if name.stage is Stage.TRAINING)
    scoring = tuple(sorted(name for name in model_stages if name.stage is Stage.INFERENCE))
    if len(trained) + len(scoring) <= 2 and len(trained) == 1:
        return [(*trained, *scoring)]
    return [*((name,) for name in trained), *((scoring,) if scoring else ())]


def _shares(devices: Devices, count: int) -> list[Devices]:
    """`count` even parts, the earlier ones taking what does not divide; one device in turn where there are too few."""
    if not count:
        return []
    if len(devices) < count:
        return [(devices[part % len(devices)],) for part in range(count)]
    edges = [-(-len(devices) * part // count) for part in range(count + 1)]
    return [devices[start:stop] for start, stop in pairwise(edges)]


def _stage(name: ModelStage, devices: Devices, tokens: int, limits: GenerationLimits | None) -> StagePlan:
    match name.stage:
        case Stage.GENERATION:
            return StagePlan(Layout(), devices, len(devices), tokens, generation=limits or GenerationLimits())
        case Stage.INFERENCE:
            return StagePlan(Layout(), devices, len(devices), tokens)
        case Stage.TRAINING:
            return StagePlan(Layout(fs=len(devices)), devices, 1, tokens)


def _shared(places: Mapping[ModelStage, Devices]) -> tuple[Group, ...]:
    """One group per set of model-stages that share a device, in the order of their phases."""
    order = {stage: rank for rank, stage in enumerate(Stage)}
    groups: dict[frozenset[DeviceId], list[ModelStage]] = {}
    for name in sorted(places, key=lambda name: (order[name.stage], name.model)):
        groups.setdefault(frozenset(places[name]), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
