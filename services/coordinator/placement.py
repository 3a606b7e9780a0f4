"""Placing a job: grants, units, first weights.

Order: grants by compare-and-set (what does not fit is refused before any process starts) → all units prepared at
once, because the ranks of a model-stage meet in one group → trained models loaded from their folders or a checkpoint,
frozen ones from their folders → every other unit filled by weight sync → plan epoch committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nereus.planning import read_shape
from nereus_common.core.emu import Unit
from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, Head, JobId, ModelStage, Stage, unit_id
from nereus_common.core.plan import Plan
from nereus_common.planning.memory import footprint, mirror_bytes
from nereus_common.stages.base import Rendezvous, UnitSpec
from nereus_common.state.architecture import ModelShape

LACKING = "name a folder with config.json, safetensors and a tokenizer"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model of a job: its folder, its head, and per stage the engine's name and options ('' and {}: the default)."""

    name: str
    path: str
    engines: Mapping[Stage, str] = field(default_factory=dict)
    options: Mapping[Stage, Mapping[str, Any]] = field(default_factory=dict)
    head: Head = Head.LM


@dataclass(frozen=True, slots=True)
class Placement:
    """What PlaceJob asks for. `checkpoint`: a complete one's folder, to load trained models from, as `version`.
    `from_copies`: they are filled from the copies that units of an earlier epoch have left."""

    job: JobId
    epoch: int
    plan: Plan
    models: Mapping[str, ModelSource]
    seed: int
    version: int = 0
    checkpoint: str = ""
    from_copies: bool = False


def unit_specs(placement: Placement, meet: Callable[[str], Rendezvous]) -> list[UnitSpec]:
    """One spec per replica of every model-stage, in plan order.

    `meet` makes a meeting point of a given prefix. Training replicas share one, because they reduce gradients with
    each other; every other unit has its own.
    """
    specs = []
    for name, stage in placement.plan.stages:
        source = source_of(placement, name)
        prefix = f"{placement.job}/{name}/e{placement.epoch}"
        shared = meet(prefix)
        specs += [
            UnitSpec(
                unit=unit_id(placement.job, name, replica, placement.epoch),
                job=placement.job,
                model_stage=name,
                replica=replica,
                epoch=placement.epoch,
                model_path=source.path,
                plan=stage,
                engine=source.engines.get(name.stage, ""),
                options=source.options.get(name.stage, {}),
                rendezvous=shared if name.stage is Stage.TRAINING else meet(f"{prefix}/r{replica}"),
                seed=placement.seed,
                head=source.head,
            )
            for replica in range(stage.replicas)
        ]
    return specs


def source_of(placement: Placement, name: ModelStage) -> ModelSource:
    source = placement.models.get(name.model)
    if source is None:
        raise InvalidPlan(
            f"the plan places {name}, and the job names no model {name.model}",
            remedy=f"add models.{name.model} to the job or drop the stage",
            field=f"models.{name.model}",
        )
    return source


async def model_shape(source: ModelSource) -> ModelShape:
    """Raises what `read_shape` raises."""
    return await asyncio.to_thread(read_shape, Path(source.path), source.head, source.name, LACKING)


async def needed_bytes(placement: Placement) -> dict[tuple[ModelStage, int, int], int]:
    """Bytes each (model-stage, replica, rank) needs. Reads every model's config; raises before anything starts."""
    shapes = {source.name: await model_shape(source) for source in placement.models.values()}
    needed = {}
    for name, stage in placement.plan.stages:
        source_of(placement, name)
        for rank in range(stage.layout.ranks):
            total = footprint(shapes[name.model], name, stage, rank).total
            if is_mirrored(placement, name):
                total += mirror_bytes(shapes[name.model], name, stage, rank)
            for replica in range(stage.replicas):
                needed[name, replica, rank] = total
    return needed


def is_mirrored(placement: Placement, name: ModelStage) -> bool:
    """Whether units of this model-stage keep copies of their state."""
    options = source_of(placement, name).options.get(name.stage, {})
    return name.stage is Stage.TRAINING and bool(options.get("redundancy", 0))


async def copies_bytes(placement: Placement, unit: Unit) -> dict[DeviceId, int]:
    """What is left of a training unit of an earlier epoch by device when only its copies are."""
    shape = await model_shape(source_of(placement, unit.model_stage))
    plan = replace(placement.plan[unit.model_stage], layout=unit.layout, devices=unit.devices, replicas=1)
    return {device: mirror_bytes(shape, unit.model_stage, plan, rank) for rank, device in enumerate(unit.devices)}


def loads_from_folder(plan: Plan, name: ModelStage) -> bool:
    """Trained models are loaded where they train; a model that nobody trains is loaded everywhere."""
    return name.stage is Stage.TRAINING or ModelStage(name.model, Stage.TRAINING) not in plan


def synced_models(plan: Plan) -> Sequence[str]:
    """Models that are trained and used elsewhere too."""
    trained = [name.model for name in plan.names if name.stage is Stage.TRAINING]
    return [model for model in trained if any(n.model == model and n.stage is not Stage.TRAINING for n in plan.names)]
