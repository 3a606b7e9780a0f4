"""How many bytes a rank of a model-stage needs on its device: the first, analytic memory model.

It counts what shapes and sharding give exactly (weights, gradients, optimizer, KV cache), and bounds the rest
(activations, logits, process overhead) from above. Units: bytes per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from nereus_common.core.ids import Head, ModelStage, Stage
from nereus_common.core.plan import Recompute, StagePlan
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
RESPONSE_SHARE = 0.5
"""Largest share of a trained microbatch's rows that predict a response token, for the size of what the head makes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    kv_cache: int
    transfer: int
    process: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.kv_cache
            + self.transfer
            + self.process
        )


def footprint(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> Footprint:
    """Of `rank` of one unit. Raises InvalidPlan where the layout does not fit the model."""
    generation = model_stage.stage is Stage.GENERATION
    boxes = shard_boxes(shape, plan.layout, rank, convention_of(model_stage.stage))
    held = sum(box.elements for region in boxes.values() for box in region)
    whole_stage = held * plan.layout.fs
    compute, master = item_bytes(plan.dtypes.compute), item_bytes(plan.dtypes.master)
    if model_stage.stage is Stage.TRAINING:
        return Footprint(
            weights=held * master + whole_stage * compute,
            gradients=held * master + whole_stage * compute,
            optimizer=2 * held * master,
            activations=_activations(shape, plan, backward=True),
            kv_cache=0,
            transfer=held * compute + STAGING,
            process=TRAINING_PROCESS,
        )
    limits = plan.generation
    return Footprint(
        weights=whole_stage * compute,
        gradients=0,
        optimizer=0,
        activations=_activations(shape, plan, backward=False),
        kv_cache=limits.kv_bytes if limits else 0,
        transfer=held * compute + STAGING,
        process=GENERATION_PROCESS if generation else TRAINING_PROCESS,
    )


def state_bytes(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> int:
    """What a transition moves to `rank`. Training holds its masters and two moments of the same size; what it computes
    with is made from them."""
    found = footprint(shape, model_stage, plan, rank)
    return found.optimizer * 3 // 2 if model_stage.stage is Stage.TRAINING else found.weights


def mirror_bytes(shape: ModelShape, model_stage: ModelStage, plan: StagePlan, rank: int) -> int:
    """Of the process on `rank`'s device that keeps copies of the rank before it."""
    mirrored = state_bytes(shape, model_stage, plan, (rank - 1) % plan.layout.ranks)
    return MIRRORED_VERSIONS * mirrored + MIRROR_PROCESS


def _activations(shape: ModelShape, plan: StagePlan, *, backward: bool) -> int:
    """Rows of a microbatch through one pipeline stage; what the backward pass keeps, and what the head makes."""
    limits = plan.generation
    rows = limits.max_batched_tokens if limits else plan.microbatch_tokens
    compute = item_bytes(plan.dtypes.compute)
    per_layer = rows * (8 * shape.hidden + 4 * shape.ffn // plan.layout.tp) * compute
    layers = max(plan.layout.layer_counts(shape.layers))
    if not backward:
        return 2 * per_layer + rows * _head_bytes(shape, plan)
    kept = per_layer + layers * rows * shape.hidden * compute
    if plan.recompute is Recompute.NONE:
        kept = layers * per_layer
    in_flight = plan.layout.pp
    return kept * in_flight + int(rows * RESPONSE_SHARE) * _head_bytes(shape, plan) * 3


def _head_bytes(shape: ModelShape, plan: StagePlan) -> int:
    """Of one row, in float32: its logits, or, for a value, the hidden state that the score head multiplies."""
    return 4 * (-(-shape.vocabulary // plan.layout.tp) if shape.head is Head.LM else shape.hidden + 1)
