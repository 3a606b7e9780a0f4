"""What a loss gives for one pack: a share of the minibatch's loss, and metrics as sums that can be added up.

No loss divides by a count of its own. Each token brings its weight, its share in the loss of the whole minibatch
(`rl.weights`), so adding the gradients of all packs, microbatches and data-parallel ranks gives the gradient of the
whole, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSums:
    """`loss`: 0-d, to be differentiated. `means`: by metric, a sum over tokens and the number of them. `largest`: the
    largest value of a metric, 0 where no token counts. All but `loss` are detached."""

    loss: Tensor
    means: Mapping[str, tuple[Tensor, Tensor]]
    largest: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, loss: Tensor, means: Mapping[str, tuple[Tensor, Tensor]], largest: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Self:
        """From metrics as (values [R], which tokens count [R])."""
        return cls(
            loss,
            {
                name: (torch.where(counted, values.detach().to(loss.dtype), 0).sum(), counted.sum())
                for name, (values, counted) in means.items()
            },
            {
                name: torch.where(counted, values.detach(), 0).max() if len(values) else loss.new_zeros(())
                for name, (values, counted) in largest.items()
            },
        )


def real_or(counted: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Tokens that do not count may carry NaN; 0 × NaN would reach the sum."""
    return torch.where(counted, values, otherwise.to(values.dtype))
