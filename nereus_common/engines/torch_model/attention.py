"""Attention over packs: each segment attends within itself, so a pack of many groups costs no cross-group work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "nereus_segments"
EXPLICIT_ROWS = 512
"""Up to here scores are kept for the backward pass: a megabyte per head."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows [start, stop) of a pack; a segment starts where the one before it stops, the first at 0.

    `mask` is added to the scores [S, S]; None where the segment is plainly causal.
    """

    start: int
    stop: int
    mask: Tensor | None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: tuple[Segment, ...],
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """[1, heads, T, D] queries, [1, kv heads, T, D] keys and values → [1, T, heads, D]; padding rows give zeros.

    Called by Hugging Face attention layers through their attention interface.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32, rounded here
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    # Split, not sliced: the backward of a split is one concatenation, that of a slice a whole tensor of zeros.
    sizes = [segment.stop - segment.start for segment in segments]
    sizes.append(query.shape[2] - sum(sizes))
    *blocks, padding = zip(*(torch.split(tensor, sizes, dim=2) for tensor in (query, key, value)), strict=True)
    parts = [_attend_within(segment, q, k, v, scaling) for segment, (q, k, v) in zip(segments, blocks, strict=True)]
    # Zeros that still depend on all three: a pack without any segment must give every parameter a gradient, or its
    # rank would reduce fewer tensors than the others.
    parts.append((padding[0] + padding[1] + padding[2]) * 0)
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend_within(segment: Segment, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of one segment. On CPUs the fused kernel's backward takes several times what short segments need."""
    rows = query.shape[2]
    if rows > EXPLICIT_ROWS or query.device.type != "cpu":
        causal = segment.mask is None
        return scaled_dot_product_attention(query, key, value, segment.mask, is_causal=causal, scale=scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = segment.mask
    if mask is None:
        mask = torch.full((rows, rows), float("-inf"), dtype=wide).triu_(1)
    scores = torch.matmul(query.to(wide) * scaling, key.to(wide).transpose(-1, -2)) + mask
    return torch.matmul(torch.softmax(scores, dim=-1), value.to(wide)).to(value.dtype)


AttentionInterface.register(NAME, attend)
