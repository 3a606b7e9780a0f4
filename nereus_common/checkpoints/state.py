"""A box of a trained model's state, and its digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nereus_common.checkpoints.fields import Field
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.state.digest import combine, digest_box
from nereus_common.state.oracle import ADAMW_MOMENTS, slot_name

Array = NDArray[np.float32]

PARAMETERS = "parameters"
KINDS = (PARAMETERS, *ADAMW_MOMENTS)


@dataclass(frozen=True, slots=True)
class BoxState:
    """`box` of the logical tensor `name` of `shape`, which is not empty, with its AdamW state; arrays of `box.shape`.

    `updates` counts the optimizer updates that the tensor has seen.
    """

    name: TensorName
    shape: tuple[int, ...]
    box: Box
    parameter: Array
    exp_avg: Array
    exp_avg_sq: Array
    updates: int

    def tensors(self) -> dict[TensorName, Array]:
        """The arrays under the names they are stored by."""
        values = (self.parameter, self.exp_avg, self.exp_avg_sq)
        return dict(zip(stored_names(self.name), values, strict=True))


def stored_names(parameter: TensorName) -> tuple[TensorName, TensorName, TensorName]:
    """Parameter and moments: `X`, `X:exp_avg`, `X:exp_avg_sq`."""
    first, second = (slot_name(parameter, slot) for slot in ADAMW_MOMENTS)
    return parameter, first, second


@dataclass(frozen=True, slots=True)
class Digests:
    """Of logical content, so independent of layout; those of disjoint boxes add up. See `state.digest`."""

    values: tuple[int, int, int] = (0, 0, 0)
    """In the order of KINDS."""

    @classmethod
    def of(cls, states: Iterable[BoxState]) -> Self:
        total = [0, 0, 0]
        for state in states:
            for index, (name, array) in enumerate(state.tensors().items()):
                total[index] = combine((total[index], digest_box(name, state.shape, state.box, array)))
        return cls((total[0], total[1], total[2]))

    @classmethod
    def sum(cls, parts: Iterable[Digests]) -> Self:
        first, second, third = zip(cls().values, *(part.values for part in parts), strict=True)
        return cls((combine(first), combine(second), combine(third)))

    def differing(self, other: Digests) -> tuple[str, ...]:
        """Which of KINDS are not the same."""
        return tuple(kind for kind, a, b in zip(KINDS, self.values, other.values, strict=True) if a != b)

    def to_dict(self) -> Mapping[str, Any]:
        """JSON has no 64-bit numbers: hexadecimal text."""
        return {kind: f"{value:016x}" for kind, value in zip(KINDS, self.values, strict=True)}

    @classmethod
    def read(cls, field: Field) -> Self:
        return cls((field[KINDS[0]].word, field[KINDS[1]].word, field[KINDS[2]].word))
