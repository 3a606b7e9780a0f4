"""The critic's loss: squared error to the returns, clipped as PPO's reference implementation does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.loss_sums import LossSums, real_or
from nereus_common.rl.options import bounded


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """R tokens of one pack. All [R]; `values` carries the gradient, the others none.

    weight and counted as in `TokenBatch`. before: the values before the step. returns: what they should have been.
    """

    values: Tensor
    weight: Tensor
    counted: Tensor
    before: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the larger of the squared errors of the value and of the value kept within `clip` of `before`.

    None clips nothing. Source: Schulman et al.'s PPO as described by Huang et al. 2022, "The 37 implementation
    details of PPO", detail 9.
    """

    clip: float | None = 0.2

    MEANS: ClassVar = ("value_error", "value_clip_fraction", "value")
    LARGEST: ClassVar = ()

    def __post_init__(self) -> None:
        if self.clip is not None:
            bounded("loss.clip", self.clip, above=0)

    def check_columns(self, names: Collection[str]) -> None:
        """InvalidInput when the loss needs a column that is not among `names`."""
        for name in ("returns", "values"):
            if name not in names:
                raise InvalidInput(
                    f"the value loss needs the column {name}", remedy="compute values and returns first", field=name
                )

    def __call__(self, tokens: ValueBatch) -> LossSums:
        nothing = torch.zeros_like(tokens.values)
        values = real_or(tokens.counted, tokens.values, nothing)
        returns = real_or(tokens.counted, tokens.returns, nothing)
        error = (values - returns).square()
        worst, clipped = error, torch.zeros_like(tokens.counted)
        if self.clip is not None:
            before = real_or(tokens.counted, tokens.before, nothing)
            kept_error = (before + (values - before).clamp(-self.clip, self.clip) - returns).square()
            worst, clipped = torch.maximum(error, kept_error), kept_error > error
        means = {
            "value_error": (error, tokens.counted),
            "value_clip_fraction": (clipped, tokens.counted),
            "value": (values, tokens.counted),
        }
        return LossSums.of((worst / 2 * tokens.weight).sum(), means, {})
