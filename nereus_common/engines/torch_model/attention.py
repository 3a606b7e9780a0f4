"""Attention over packs: each segment attends within itself, so a pack of many groups costs no cross-group work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "nereus_segments"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows [start, stop) of a pack; `mask` is added to the scores [S, S], None where the segment is plainly causal."""

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
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    parts = []
    for segment in segments:
        rows = slice(segment.start, segment.stop)
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        causal = segment.mask is None
        parts.append(scaled_dot_product_attention(q, k, v, segment.mask, is_causal=causal, scale=scaling))
    end = segments[-1].stop if segments else 0
    # Zeros that still depend on all three: a pack without any segment must give every parameter a gradient, or its
    # rank would reduce fewer tensors than the others.
    parts.append((query[:, :, end:] + key[:, :, end:] + value[:, :, end:]) * 0)
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
