"""Each token's share in the loss of its minibatch: the only place where a loss is divided by anything.

Weights are computed once, over the whole batch, before it is cut over replicas, ranks and microbatches.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch

Aggregation = Literal["token", "sequence", "constant"]


def cut_minibatches(groups: int, minibatches: int) -> NDArray[np.int32]:
    """[G] the minibatch of each group: contiguous, sizes differing by at most one.

    Where groups are fewer than minibatches some stay empty, so cut into at most as many as there are groups.
    """
    return (np.arange(groups, dtype=np.int64) * minibatches // max(groups, 1)).astype(np.int32)


def minibatches_of(batch: RolloutBatch) -> NDArray[np.int32]:
    """[G] the column, or zeros where the whole batch is one minibatch."""
    return batch.minibatch if len(batch.minibatch) else np.zeros(batch.groups, np.int32)


def minibatch_tokens(batch: RolloutBatch, minibatches: int) -> tuple[int, ...]:
    """Unmasked response tokens of each minibatch."""
    per_sequence = _tokens_per_sequence(batch)
    counts = np.bincount(minibatches_of(batch)[batch.group], per_sequence, minlength=minibatches)
    return tuple(int(count) for count in counts)


def loss_weights(
    batch: RolloutBatch, minibatches: int, aggregation: Aggregation, *, longest: int = 0
) -> NDArray[np.float32]:
    """[R] weights; over a minibatch of T unmasked tokens in N sequences that have any, the unmasked ones weigh:

    token: 1 / T (DAPO; Yu et al. 2025, arXiv 2503.14476, §3.3).
    sequence: 1 / (N · own length) (GRPO; Shao et al. 2024, arXiv 2402.03300, eq. 3).
    constant: 1 / (sequences · `longest`), whatever is masked (Dr. GRPO; Liu et al. 2025, arXiv 2503.20783).

    InvalidInput for `constant` without `longest` > 0.
    """
    lengths = _tokens_per_sequence(batch)
    of_sequence = minibatches_of(batch)[batch.group]

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Per sequence, the sum over its minibatch."""
        return np.maximum(np.bincount(of_sequence, values, minlength=minibatches), 1.0)[of_sequence]

    match aggregation:
        case "token":
            share = 1 / total(lengths)
        case "sequence":
            share = 1 / (total((lengths > 0).astype(np.float64)) * np.maximum(lengths, 1.0))
        case "constant":
            if longest < 1:
                raise InvalidInput(f"a constant of {longest} tokens", remedy="at least 1", field="longest")
            share = 1 / (total(np.ones_like(lengths)) * longest)
    return (np.repeat(share, batch.response_lengths) * batch.mask).astype(np.float32)


def _tokens_per_sequence(batch: RolloutBatch) -> NDArray[np.float64]:
    owner = np.repeat(np.arange(batch.sequences), batch.response_lengths)
    return np.bincount(owner, batch.mask, minlength=batch.sequences).astype(np.float64)
