"""What the policy itself did in each sequence: its unmasked tokens, without what an environment wrote between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nereus_common.rl.rollouts import RolloutBatch

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """U unmasked tokens of N sequences, in the batch's order.

    token [U]: the place of each in the per-token columns, which have `size` entries. lengths [N]: unmasked tokens per
    sequence, some maybe 0.
    """

    token: NDArray[np.int64]
    lengths: NDArray[np.int64]
    size: int

    @classmethod
    def of(cls, batch: RolloutBatch) -> Self:
        token = np.flatnonzero(batch.mask)
        owner = np.repeat(np.arange(batch.sequences), batch.response_lengths)[token]
        return cls(token, np.bincount(owner, minlength=batch.sequences), len(batch.mask))

    @property
    def owner(self) -> NDArray[np.int64]:
        """[U] the sequence of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def last(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sequences that have any token, and where among the U their last one is."""
        some = np.flatnonzero(self.lengths)
        return some, np.cumsum(self.lengths)[some] - 1

    def pick(self, column: NDArray[np.float32]) -> Floats:
        """[size] → [U]."""
        return column[self.token].astype(np.float64)

    def spread(self, values: Floats) -> NDArray[np.float32]:
        """[U] → [size], 0 on masked tokens."""
        column = np.zeros(self.size, np.float32)
        column[self.token] = values
        return column

    def totals(self, values: Floats) -> Floats:
        """[U] → [N]: the sum over each sequence."""
        return np.bincount(self.owner, values, minlength=len(self.lengths)).astype(np.float64)

    def following(self, values: Floats) -> Floats:
        """[U] at each token the value of the sequence's next one, 0 at its last."""
        moved = np.zeros_like(values)
        moved[:-1] = values[1:]
        moved[self.last[1]] = 0
        return moved

    def to_go(self, values: Floats, decay: float) -> Floats:
        """[U] at token t of a sequence, Σ_{i ≥ t} decay^(i−t) · value_i.

        All sequences are walked at once from their ends, so the loop runs over the longest length only.
        """
        sums = values.copy()
        order = np.argsort(-self.lengths, kind="stable")
        ends, lengths = np.cumsum(self.lengths)[order], self.lengths[order]
        for back in range(1, int(lengths.max(initial=0))):
            here = ends[: np.searchsorted(-lengths, -back)] - 1 - back
            sums[here] += decay * sums[here + 1]
        return sums


def whitened(values: Floats) -> Floats:
    """[U] with mean 0 and variance 1 (the sample's variance, with Bessel's correction, + 1e-8); zeros for one token."""
    if len(values) < 2:
        return np.zeros_like(values)
    whole: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whole
