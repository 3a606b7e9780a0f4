"""Floating-point operations of a rank, counted from the boxes that it holds.

A matrix of which a rank holds a box of e elements costs it e multiply-adds for each row that goes through it: so the
layout oracle, with its shared KV heads, padding and uneven pipelines, is also what is counted with. An expert's matrix
costs that for the rows that are sent to it. Attention costs two products of head_dim for each query head and pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import Head, Stage, TensorName
from nereus_common.core.layout import Layout
from nereus_common.planning.tokens import Tokens
from nereus_common.state.architecture import EMBEDDING, HEAD, SCORE, Home, ModelShape
from nereus_common.state.boxes import Region, elements
from nereus_common.state.conventions import convention_of
from nereus_common.state.oracle import shard_boxes

QUERIES = "self_attn.q_proj.weight"
Reals = float | NDArray[np.float64]
PER_MULTIPLY_ADD = 2
BACKWARD = 2
"""A backward pass costs as many products as two forward ones: of the gradient with weights, and with inputs."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one rank."""

    gemm: float
    attention: float

    @property
    def total(self) -> float:
        return self.gemm + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.gemm + other.gemm, self.attention + other.attention)

    def times(self, factor: float) -> Flops:
        return Flops(self.gemm * factor, self.attention * factor)


@dataclass(frozen=True, slots=True)
class RankShape:
    """What a rank computes with, in multiply-adds: `body` for each row, `head` for each row that predicts, `pair` for
    each pair of positions. `experts`: elements of all its experts; `body` has those that a row goes through."""

    body: float
    head: float
    pair: float
    experts: float = 0.0

    def forward(self, tokens: Tokens) -> Flops:
        gemm = self.body * tokens.rows + self.head * tokens.predicted
        return Flops(PER_MULTIPLY_ADD * gemm, PER_MULTIPLY_ADD * self.pair * tokens.pairs)

    def backward(self, tokens: Tokens, *, recompute: bool) -> Flops:
        """`recompute`: the layers' forward pass is made again; the head's is not."""
        twice = self.forward(tokens).times(BACKWARD)
        return twice + replace(self, head=0.0).forward(tokens) if recompute else twice


def weights_read(body: Reals, experts: Reals, chosen: float, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elements that passes of so many rows read, where `body` is what one row is multiplied with: an expert is read
    once for all rows that are sent to it, and not at all where none is."""
    touched = 1 - (1 - chosen) ** rows
    return np.asarray(body + experts * (touched - chosen))


@lru_cache(maxsize=4096)
def rank_shape(model: ModelShape, stage: Stage, layout: Layout, pipeline_stage: int) -> RankShape:
    """Of the busiest tensor rank on a pipeline stage. fs does not matter: a shard's rank gathers whole matrices.

    Raises what the layout oracle raises where the layout does not fit the model.
    """
    plain = replace(layout, fs=1, ep=1)
    first = pipeline_stage * plain.tp
    held = [shard_boxes(model, plain, first + rank, convention_of(stage)) for rank in range(plain.tp)]
    head = _head_name(model) if pipeline_stage == plain.pp - 1 else None
    return max((_of_boxes(model, boxes, head) for boxes in held), key=lambda found: found.body + found.head)


def _of_boxes(model: ModelShape, boxes: Mapping[TensorName, Region], head: TensorName | None) -> RankShape:
    """`head`: the matrix that predicts, where it is on this pipeline stage: a tied one is also the first stage's."""
    tensors, body, queries, experts = model.tensors(), 0.0, 0.0, 0.0
    chosen = chosen_experts(model)
    for name, region in boxes.items():
        tensor = tensors[name]
        if tensor.home is Home.LAYER and len(tensor.shape) == 2:
            size = elements(region)
            body += size * (1.0 if tensor.expert is None else chosen)
            experts += 0 if tensor.expert is None else size
            queries += size / model.hidden if name.endswith(QUERIES) else 0
    return RankShape(body, elements(boxes[head]) if head else 0.0, 2 * queries, experts)


def chosen_experts(model: ModelShape) -> float:
    """The share of its experts that a row goes through."""
    return model.experts.per_token / model.experts.count if model.experts else 1.0


def _head_name(model: ModelShape) -> TensorName:
    if model.head is Head.SCORE:
        return SCORE
    return EMBEDDING if model.tied else HEAD
