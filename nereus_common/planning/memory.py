"""How many bytes a rank of a model-stage needs on its device: an analytic model.

It counts what shapes and sharding give exactly (weights, gradients, optimizer, KV cache), and bounds the rest
(activations, logits, process overhead) from above. Units: bytes per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from nereus_common.core.ids import DeviceId, Head, ModelStage, Stage
from nereus_common.core.plan import Plan, Recompute, StagePlan
from nereus_common.planning.placements import Column, Placements
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import convention_of
from nereus_common.state.dtypes import item_bytes
from nereus_common.state.oracle import shard_boxes

TRAINING_PROCESS = 600 << 20
"""Interpreter, torch, communicators and transport of a torch worker on CPU; measured 0.45–0.55 GiB resident."""
GENERATION_PROCESS = 2600 << 20
"""Engine host, EngineCore and worker of one vLLM rank on CPU, without weights and KV cache."""
GENERATION_HOST = 700 << 20
"""Engine host alone, which stays when the unit sleeps; measured 0.45 GiB proportional, 0.7 GiB resident."""
STAGING = 256 << 20
"""One bucket in flight, and its staged copy."""
MIRROR_PROCESS = 120 << 20
"""Interpreter, numpy and transport of a process that keeps copies; measured 87 MiB beside them."""
MIRRORED_VERSIONS = 2
"""How many versions it keeps."""
ROWS_PER_PREDICTED = 2
"""At most every second row of a trained microbatch predicts a response token, for the size of what the head makes."""

Count = TypeVar("Count", int, Column)


@dataclass(frozen=True, slots=True)
class Footprint(Generic[Count]):
    """Bytes of one rank by what they are for: of one plan, or columns over many placements."""

    weights: Count
    gradients: Count
    optimizer: Count
    activations: Count
    kv_cache: Count
    transfer: Count
    process: Count

    @property
    def parts(self) -> dict[str, Count]:
        """By name, in the order in which they are told."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> Count:
        first, *rest = self.parts.values()
        for part in rest:
            first = first + part
        return first


@dataclass(frozen=True, slots=True)
class _Rank(Generic[Count]):
    """What a footprint follows from. `held`: parameters of the rank; `gathered`: with those of its fs group; `layers`:
    of the fullest pipeline stage; `rows`: of the largest batch that goes through at once. Bytes of an element in
    `master` and `compute`; `recompute` is 0 or 1."""

    model: ModelShape
    stage: Stage
    held: Count
    gathered: Count
    layers: Count
    tp: Count
    pp: Count
    rows: Count
    recompute: Count
    master: Count
    compute: Count
    kv_bytes: Count

    def footprint(self) -> Footprint[Count]:
        none, training = 0 * self.held, self.stage is Stage.TRAINING
        process = GENERATION_PROCESS if self.stage is Stage.GENERATION else TRAINING_PROCESS
        computed = self.gathered * self.compute
        return Footprint(
            weights=self.held * self.master + computed if training else computed,
            gradients=self.held * self.master + computed if training else none,
            optimizer=2 * self.held * self.master if training else none,
            activations=self._kept() if training else 2 * self._layer() + self.rows * self._head(),
            kv_cache=self.kv_bytes,
            transfer=self.held * self.compute + STAGING,
            process=none + process,
        )

    def _kept(self) -> Count:
        """What the backward pass needs of the microbatches in flight, and what the head makes of one."""
        whole = self.layers * self._layer()
        inputs = self._layer() + self.layers * self.rows * self.model.hidden * self.compute
        kept = self.recompute * inputs + (1 - self.recompute) * whole
        return kept * self.pp + self.rows // ROWS_PER_PREDICTED * self._head() * 3

    def _layer(self) -> Count:
        return self.rows * (8 * self.model.hidden + 4 * self.model.ffn // self.tp) * self.compute

    def _head(self) -> Count:
        """Of one row, in float32: its logits, or, for a value, the hidden state that the score head multiplies."""
        if self.model.head is Head.LM:
            return 4 * -(-self.model.vocabulary // self.tp)
        return 0 * self.tp + 4 * (self.model.hidden + 1)


def footprint(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> Footprint[int]:
    """Of `rank` of one unit. Raises InvalidPlan where the layout does not fit the model."""
    boxes = shard_boxes(shape, plan.layout, rank, convention_of(model_stage.stage))
    held = sum(box.elements for region in boxes.values() for box in region)
    limits = plan.generation
    return _Rank(
        model=shape,
        stage=model_stage.stage,
        held=held,
        gathered=held * plan.layout.fs,
        layers=max(plan.layout.layer_counts(shape.layers)),
        tp=plan.layout.tp,
        pp=plan.layout.pp,
        rows=limits.max_batched_tokens if limits else plan.microbatch_tokens,
        recompute=int(plan.recompute is Recompute.FULL),
        master=item_bytes(plan.dtypes.master),
        compute=item_bytes(plan.dtypes.compute),
        kv_bytes=limits.kv_bytes if limits else 0,
    ).footprint()


def footprints(placements: Placements) -> Footprint[Column]:
    """Of the fullest rank of each row."""
    generates = placements.name.stage is Stage.GENERATION
    return _Rank(
        model=placements.model,
        stage=placements.name.stage,
        held=-(-placements.held // placements.fs),
        gathered=placements.held,
        layers=np.maximum(placements.busiest.layers, placements.last.layers),
        tp=placements.tp,
        pp=placements.pp,
        rows=placements.batched if generates else placements.microbatch,
        recompute=placements.recompute,
        master=placements.master_item,
        compute=placements.item,
        kv_bytes=placements.kv_bytes if generates else np.zeros_like(placements.tp),
    ).footprint()


def device_bytes(plan: Plan, shapes: Mapping[ModelStage, ModelShape]) -> dict[DeviceId, int]:
    """What all units of a plan need together, by device."""
    used: dict[DeviceId, int] = {}
    for name, stage in plan.stages:
        of_rank = [footprint(shapes[name], name, stage, rank).total for rank in range(stage.layout.ranks)]
        for place, device in enumerate(stage.devices):
            used[device] = used.get(device, 0) + of_rank[place % len(of_rank)]
    return used


def state_bytes(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> int:
    """What a transition moves to `rank`. Training holds its masters and two moments of the same size; what it computes
    with is made from them."""
    found = footprint(shape, model_stage, plan, rank)
    return found.optimizer * 3 // 2 if model_stage.stage is Stage.TRAINING else found.weights


def mirror_bytes(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> int:
    """Of the process on `rank`'s device that keeps copies of the rank before it."""
    mirrored = state_bytes(shape, model_stage, plan, (rank - 1) % plan.layout.ranks)
    return MIRRORED_VERSIONS * mirrored + MIRROR_PROCESS
