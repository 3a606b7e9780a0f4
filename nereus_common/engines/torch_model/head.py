"""Log-probs of given tokens over a vocabulary that may be cut over tensor-parallel ranks; values by a head of one row.

The logits are accumulated and kept in float32, as the sampler's float32 head does, whatever the dtype of hidden
states and head. Products of two bfloat16 numbers are exact in float32, so on CPUs with bfloat16 matrix units the
float32 multiplication may use them without losing anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    first_row: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, both [R] float32 or wider, of softmax(hidden · weightᵀ / temperature).

    hidden [R, H]. weight [V_local, H]: rows from `first_row` of the vocabulary; the ranks of `group` hold the others.
    targets [R]: token ids of the whole vocabulary. Only the log-probs are differentiable.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, first_row, group)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def position_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """[R] float32 or wider: hidden [R, H] · weight [1, H], the same on every tensor-parallel rank.

    The hidden states after the last layer are whole on each of them, so are the gradients: there is nothing to reduce.
    """
    return (_wide(hidden) @ _wide(weight).T)[:, 0]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        first_row: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        with _exact_products(hidden.dtype):
            logits = _wide(hidden) @ _wide(weight).T
        logits /= temperature
        local = targets - first_row
        inside = (local >= 0) & (local < weight.shape[0])
        local = local.clamp(0, weight.shape[0] - 1)
        largest = _reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        chosen = logits.gather(-1, local[:, None])[:, 0] * inside
        logits -= largest[:, None]
        weighted = torch.exp(logits)
        normaliser = weighted.sum(-1)
        first_moment = torch.linalg.vecdot(weighted, logits)
        normaliser, first_moment, chosen = _reduce(torch.stack([normaliser, first_moment, chosen]), group)
        weighted /= normaliser[:, None]
        log_normaliser = torch.log(normaliser)
        ctx.save_for_backward(hidden, weight, weighted, local, inside)
        ctx.temperature, ctx.group = temperature, group
        entropy = log_normaliser - first_moment / normaliser
        ctx.mark_non_differentiable(entropy)
        return chosen - largest - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, probabilities, local, inside = ctx.saved_tensors
        scale = (grad / ctx.temperature)[:, None]
        grad_logits = probabilities * -scale
        grad_logits.scatter_add_(1, local[:, None], scale * inside[:, None])
        if hidden.dtype == torch.bfloat16:
            grad_logits = grad_logits.to(torch.bfloat16)
        grad_hidden = _reduce(_wide(grad_logits @ weight), ctx.group)
        return grad_hidden.to(hidden.dtype), grad_logits.T @ hidden, None, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None and tensor.numel():
        dist.all_reduce(tensor, op, group=group)
    return tensor


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Let float32 products of bfloat16 values use bfloat16 matrix units: the values survive the conversion."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
