"""From a model folder to a stage on its device: built on `meta`, cut, then given storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nereus_common.core.ids import Head
from nereus_common.core.plan import Recompute, StagePlan
from nereus_common.engines.torch_model.attention import NAME as ATTENTION
from nereus_common.engines.torch_model.shards import box_of
from nereus_common.engines.torch_model.stage import StageModel
from nereus_common.engines.torch_model.world import World

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_LAYER_PLAN: dict[str, type[ColwiseParallel] | type[RowwiseParallel]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}
"""Megatron's cut of a layer (Shoeybi et al. 2019)."""


def build_stage(
    model_path: str, plan: StagePlan, world: World, device: torch.device, *, train: bool, head: Head = Head.LM
) -> StageModel:
    """This rank's stage with storage of undefined content; float32 masters for training, else the compute dtype."""
    compute = TORCH_DTYPES[plan.dtypes.compute]
    full = _on_meta(model_path, head, torch.float32 if train else compute)
    layers = world.layout.layer_ranges(full.config.num_hidden_layers)[world.place.pp]
    stage = StageModel(full, layers, world, head=head, recompute=train and plan.recompute is Recompute.FULL)
    if world.layout.tp > 1:
        _cut_tensors(stage, world)
    if stage.lm_head is not None:
        stage.first_row = box_of(stage.lm_head.get_parameter("weight"))[0].start[0]
    if train or world.layout.fs > 1:
        _shard_fully(stage, world, compute)
    stage.to_empty(device=device)
    stage.tie()
    stage.rotary = type(full.model.rotary_emb)(full.config).to(device)
    return stage.requires_grad_(train).train(train)


def _on_meta(model_path: str, head: Head, dtype: torch.dtype) -> Any:
    """The whole model without storage. A decoder of any head may stand in the folder: only its config is read."""
    config = AutoConfig.from_pretrained(model_path)
    if head is Head.SCORE:
        config.num_labels = 1
    kind = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    with torch.device("meta"):
        return kind.from_config(config, attn_implementation=ATTENTION, dtype=dtype)


def fsdp_modules(stage: StageModel) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def _cut_tensors(stage: StageModel, world: World) -> None:
    """Layers by `_LAYER_PLAN`, embedding and head by vocabulary rows."""
    mesh = world.mesh["tp"]
    for layer in stage.model.layers.values():
        styles: dict[str, ParallelStyle] = {name: style() for name, style in _LAYER_PLAN.items()}
        parallelize_module(layer, mesh, styles)
    if stage.model.embed_tokens is not None:
        parallelize_module(stage.model.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
    if stage.lm_head is not None:
        parallelize_module(stage.lm_head, mesh, ColwiseParallel())
    stage.tie()


def _shard_fully(stage: StageModel, world: World, compute: torch.dtype) -> None:
    """FSDP2 over (replica, fs): cast once per step at the all-gather, gradients accumulated and reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": world.mesh["replica", "fs"], "mp_policy": policy, "reshard_after_forward": False}
    for layer in stage.model.layers.values():
        fully_shard(layer, **options)
    fully_shard(stage, **options)
    if world.data_parallel == 1:
        return
    for module in fsdp_modules(stage):
        # The loss is divided by the global token count: gradients are summed, not averaged.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
