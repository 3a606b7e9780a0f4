"""Where a rank of a vLLM model keeps each logical tensor, told by the live modules themselves.

A surface is one matrix (or vector) that the model computes with; its parts say which box of which logical tensor lies
in which of its rows. Fused layers (qkv, gate_up) are one surface with several parts; a tied embedding is one tensor
under several surfaces, of which `weights` is the one that is loaded and the others are copies that must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from nereus_common.core.errors import UnsupportedByEngine
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation import readback

WEIGHTS = "weights"
TIED_NAME = TensorName("model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [row, row + box rows) of a surface are `box` of `tensor`, which has `shape` as a whole."""

    tensor: TensorName
    shape: tuple[int, ...]
    box: Box
    row: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.box.shape[0])


@dataclass(frozen=True, slots=True)
class Surface:
    """`exact`: read bit for bit, not through a product. `copy`: WEIGHTS, or which other copy this is."""

    name: str
    copy: str
    exact: bool
    read: Callable[[], torch.Tensor]
    parts: tuple[Part, ...]


def surfaces(model: torch.nn.Module) -> tuple[Surface, ...]:
    """Every surface of this rank; UnsupportedByEngine for a module with parameters that no rule covers."""
    return tuple(surface for name, module in model.named_modules() for surface in _of_module(model, name, module))


def _of_module(model: Any, name: str, module: Any) -> Iterator[Surface]:
    match module:
        case ParallelLMHead():
            yield from _head(model, name, module)
        case VocabParallelEmbedding():
            yield Surface(name, WEIGHTS, True, lambda: readback.embedding(module), (_vocabulary(name, module),))
        case LinearBase():
            yield from _linear(model, name, module)
        case RMSNorm():
            yield _vector(f"{name}.weight", lambda: module.weight, [(f"{name}.weight", *_whole(module.weight))])
        case _ if next(module.parameters(recurse=False), None) is not None:
            raise UnsupportedByEngine(
                f"{name} ({type(module).__name__}) has parameters that cannot be read back",
                remedy="use a model of the supported architectures, without quantization",
                module=name,
            )


def _head(model: Any, name: str, head: Any) -> Iterator[Surface]:
    """The output head: as the logits are computed, and the packed copy where that is another one."""
    tied = model.config.tie_word_embeddings
    part = _vocabulary(name, head)
    if tied:
        part = Part(TIED_NAME, part.shape, part.box, part.row)
    processor = model.logits_processor
    yield Surface(
        name, "output head" if tied else WEIGHTS, False, lambda: readback.head_in_use(processor, head), (part,)
    )
    if processor.head_dtype != model.model.embed_tokens.weight.dtype:
        yield Surface(f"{name} packed", "packed output head", False, lambda: readback.product(head), (part,))


def _vocabulary(name: str, module: Any) -> Part:
    """Rows of the vocabulary this rank holds; the padding below them is nobody's."""
    shard = module.shard_indices
    start, stop = shard.org_vocab_start_index, shard.org_vocab_end_index
    width = module.embedding_dim
    return Part(TensorName(f"{name}.weight"), (module.org_vocab_size, width), Box((start, 0), (stop, width)), 0)


def _linear(model: Any, name: str, module: Any) -> Iterator[Surface]:
    match module:
        case RowParallelLinear():
            pieces = [(name, 0, module.output_size, module.output_size)]
            first = module.tp_rank * module.input_size_per_partition
        case QKVParallelLinear():
            pieces, first = _qkv(model, name, module), 0
        case ColumnParallelLinear():
            pieces, first = _columns(model, name, module), 0
        case _:
            pieces, first = [(name, 0, module.output_size, module.output_size)], 0
    last = first + module.input_size_per_partition if isinstance(module, RowParallelLinear) else module.input_size
    parts, row = [], 0
    for logical, start, count, total in pieces:
        box = Box((start, first), (start + count, last))
        parts.append(Part(TensorName(f"{logical}.weight"), (total, module.input_size), box, row))
        row += count
    yield Surface(name, WEIGHTS, False, lambda: readback.product(module), tuple(parts))
    if getattr(module, "bias", None) is not None:
        rows = [(f"{logical}.bias", start, count, total) for logical, start, count, total in pieces]
        yield _vector(f"{name}.bias", lambda: module.bias, rows)


def _vector(name: str, read: Callable[[], torch.Tensor], pieces: list[tuple[str, int, int, int]]) -> Surface:
    parts, row = [], 0
    for tensor, start, count, total in pieces:
        parts.append(Part(TensorName(tensor), (total,), Box((start,), (start + count,)), row))
        row += count
    return Surface(name, WEIGHTS, True, read, tuple(parts))


def _whole(vector: torch.Tensor) -> tuple[int, int, int]:
    return 0, vector.shape[0], vector.shape[0]


def _unfused(model: Any, name: str) -> list[str]:
    """Logical modules inside a fused one: qkv_proj → q_proj, k_proj, v_proj."""
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{logical}" for logical in model.packed_modules_mapping.get(leaf, [leaf])]


def _qkv(model: Any, name: str, module: Any) -> list[tuple[str, int, int, int]]:
    """(logical module, first row, rows, rows in all) of q, k, v; KV heads are replicated where tp exceeds them."""
    query, key, value = _unfused(model, name)
    size, heads, kv_heads = module.head_size, module.num_heads, module.num_kv_heads
    shard = module.tp_rank // module.num_kv_head_replicas
    kv = (shard * kv_heads * size, kv_heads * size, module.total_num_kv_heads * size)
    return [
        (query, module.tp_rank * heads * size, heads * size, module.total_num_heads * size),
        (key, *kv),
        (value, *kv),
    ]


def _columns(model: Any, name: str, module: Any) -> list[tuple[str, int, int, int]]:
    totals = getattr(module, "output_sizes", None) or [module.output_size]
    return [
        (logical, module.tp_rank * count, count, total)
        for logical, count, total in zip(_unfused(model, name), module.output_partition_sizes, totals, strict=True)
    ]
