"""AdamW over the float32 masters that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nereus_common.engines.options import Optimizer
from nereus_common.engines.torch_model.shards import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """State of one shard, of the shard's shape; `step` counts its updates (0-d float32)."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class ShardOptimizer:
    """Updates local shards in place. State exists from the start, so no rank ever lacks a counter; it is undefined,
    and on a CPU takes no memory, until it is filled or `reset`."""

    def __init__(self, shards: Sequence[Shard], options: Optimizer) -> None:
        self._shards = shards
        # The same storage as the model's parameters, without DTensor's dispatch.
        self._parameters = [nn.Parameter(shard.local) for shard in shards]
        groups = [
            {"params": [p for p, s in zip(self._parameters, shards, strict=True) if (len(s.shape) > 1) is decayed]}
            for decayed in (True, False)
        ]
        groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        for parameter in self._parameters:
            moments = {name: torch.empty_like(parameter, requires_grad=False) for name in MOMENTS}
            step = torch.empty((), dtype=torch.float32, device=parameter.device)
            self._adam.state[parameter] = {"step": step, **moments}

    def reset(self) -> None:
        """Zero moments and counters."""
        for state in self._adam.state.values():
            for tensor in state.values():
                tensor.zero_()

    def step(self, gradients: Iterable[Tensor], learning_rate: float) -> None:
        """One update; `gradients` in the order of the shards."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def moments(self) -> Mapping[str, Moments]:
        """By logical name; the tensors are the live ones."""
        return {
            shard.name: Moments(**self._adam.state[parameter])
            for shard, parameter in zip(self._shards, self._parameters, strict=True)
        }
