"""Hugging Face's own modules, and torch's own sharding of them, as witnesses of the TRAINING convention.

Every rank is played in turn in this process: a "fake" process group has the size and rank, and no communication is
needed to shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.ids import Head, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import TRAINING
from nereus_common.state.oracle import shard_boxes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

CONFIG: dict[str, Any] = {
    "hidden_size": 18,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 2,
    "vocab_size": 25,
    "max_position_embeddings": 8,
}
CLASSIFIER = {"num_labels": 1}
VARIANTS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("gemma2", {}),
    ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    *((family, CLASSIFIER) for family in ("llama", "mistral", "qwen2", "qwen3")),
    ("qwen2", {"tie_word_embeddings": True, **CLASSIFIER}),
]


def build(family: str, changes: dict[str, Any]) -> tuple[Any, ModelShape]:
    """The model on the CPU, each parameter filled with its own element indices, and its shape by the rules."""
    config = transformers.AutoConfig.for_model(family, **CONFIG, **changes)
    scores = "num_labels" in changes
    kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return model, ModelShape.from_config(config.to_dict(), Head.SCORE if scores else Head.LM)


@contextmanager
def played_rank(rank: int, fs: int, tp: int) -> Iterator[Any]:
    """A (fs, tp) mesh as `rank` sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=fs * tp, store=FakeStore())
    try:
        yield torch.distributed.init_device_mesh("cpu", (fs, tp), mesh_dim_names=("fs", "tp"))
    finally:
        torch.distributed.destroy_process_group()


def shard(model: Any, mesh: Any) -> None:
    """Tensor parallelism by torch's own styles, then FSDP2: per layer, then the rest."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cuts = {f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"}
    cuts |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    cuts |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], cuts, src_data_rank=None)
    embedding = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model.model, mesh["tp"], {"embed_tokens": embedding}, src_data_rank=None)
    if not hasattr(model, "lm_head"):
        pass  # a score head is whole on every tp rank
    elif model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()}, src_data_rank=None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fs"])
    fully_shard(model, mesh=mesh["fs"])


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_rules_name_and_shape_every_parameter_of_the_real_model(family: str, changes: dict[str, Any]) -> None:
    model, shape = build(family, changes)
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: tensor.shape for name, tensor in shape.tensors().items()} == real


@pytest.mark.parametrize(("tp", "fs"), [(1, 1), (1, 2), (1, 4), (1, 7), (3, 1), (3, 2), (3, 3), (3, 5)])
@pytest.mark.parametrize(("family", "changes"), VARIANTS[1:5:3] + VARIANTS[5:6] + VARIANTS[7:8] + VARIANTS[-1:])
def test_fsdp_over_tensor_parallelism_leaves_each_rank_the_boxes_of_the_oracle(
    family: str, changes: dict[str, Any], tp: int, fs: int
) -> None:
    layout = Layout(tp=tp, fs=fs)
    for rank in range(layout.ranks):
        model, shape = build(family, changes)
        with played_rank(rank, fs, tp) as mesh:
            shard(model, mesh)
            boxes = shard_boxes(shape, layout, rank, TRAINING)
            for name, parameter in model.named_parameters():
                compare(shape, TensorName(name), parameter, boxes)


def compare(shape: ModelShape, name: TensorName, parameter: Any, boxes: dict[TensorName, tuple[Box, ...]]) -> None:
    tensor = shape.tensors()[name]
    indices = np.arange(tensor.elements).reshape(tensor.shape)
    local = getattr(parameter, "to_local", lambda: parameter)().detach().numpy()
    if not boxes[name]:
        assert local.size == 0, name
        return
    (box,) = boxes[name]
    assert local.shape == box.shape, name
    assert (local == indices[box.slices]).all(), name


@pytest.mark.parametrize(("tp", "fs"), [(1, 4), (3, 2), (3, 5)])
@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"attention_bias": True, **CLASSIFIER}])
def test_the_offsets_that_dtensor_computes_are_those_of_the_oracle(changes: dict[str, Any], tp: int, fs: int) -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as offsets_of

    model, shape = build("qwen3", changes)
    layout = Layout(tp=tp, fs=fs)
    with played_rank(0, fs, tp) as mesh:
        shard(model, mesh)
        for name, parameter in model.named_parameters():
            degrees = tuple(parameter.device_mesh.shape)
            for rank in range(layout.ranks):
                place = layout.coordinate(rank)
                spot = [place.fs] if len(degrees) == 1 else [place.fs, place.tp]
                size, offset = offsets_of(parameter.shape, degrees, spot, parameter.placements)
                region = shard_boxes(shape, layout, rank, TRAINING)[TensorName(name)]
                if region:
                    assert (region[0].shape, region[0].start) == (tuple(size), tuple(offset)), name
                else:
                    assert 0 in size, name


SPARSE = {"num_experts_per_tok": 1, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 9}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"num_local_experts": 2}),
        ("qwen2_moe", {"num_experts": 3, "decoder_sparse_step": 2}),
        ("qwen3_moe", {"num_experts": 3, "attention_bias": True}),
        ("qwen3_moe", {"num_experts": 3, "mlp_only_layers": [0], "tie_word_embeddings": True}),
    ],
)
def test_the_rules_name_and_shape_every_tensor_that_a_sparse_model_saves(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The modules keep experts stacked; the checkpoint, which names logical tensors, has them one by one."""
    config = transformers.AutoConfig.for_model(family, **CONFIG, **SPARSE, **changes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as saved:
        real = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    shape = ModelShape.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert {name: tensor.shape for name, tensor in shape.tensors().items()} == real
