"""A decoder layer with the rounding of the sampler's kernels.

Hugging Face adds the residual in the compute dtype and normalises the rounded sum; the sampler's fused kernel adds in
float32, normalises that sum, and rounds the residual only to carry it on. In bfloat16 the difference is a good part of
the log-prob gap between trainer and sampler; in float32 both are the same.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Carried = tuple[Tensor, Tensor | None]
"""What a layer adds to the residual [1, T, H], and the residual before it; None before the first layer of a stage."""


def carry_residual(layer: nn.Module) -> None:
    """Have a Hugging Face decoder layer (Llama, Qwen2, Qwen3) take and return `Carried` instead of their sum."""
    layer.forward = MethodType(_forward, layer)


def add_and_norm(norm: Any, states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum), both in the dtype of `states`; the norm sees the sum before it is rounded."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    total = wide if residual is None else wide + residual.to(wide.dtype)
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (total * scale).to(states.dtype), total.to(states.dtype)


def _forward(self: Any, states: Tensor, residual: Tensor | None, **attention: Any) -> Carried:
    normed, residual = add_and_norm(self.input_layernorm, states, residual)
    attended, _ = self.self_attn(hidden_states=normed, attention_mask=None, **attention)
    normed, residual = add_and_norm(self.post_attention_layernorm, attended, residual)
    return self.mlp(normed), residual
