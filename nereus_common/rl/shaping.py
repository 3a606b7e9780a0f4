"""What may be done to a scored batch before advantages and weights are computed from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch


def overlong_penalty(lengths: NDArray[np.int64], length: int, buffer: int, penalty: float) -> NDArray[np.float32]:
    """[N] what responses of `lengths` [N] tokens get on top of their rewards, between 0 and −`penalty`.

    0 up to `length` − `buffer` tokens, from there a straight line down to −`penalty` at `length` tokens, and the same
    beyond: penalty · R_length of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13). InvalidInput unless
    0 < buffer ≤ length.
    """
    if not 0 < buffer <= length:
        raise InvalidInput(
            f"an overlong buffer of {buffer} tokens for responses of {length}",
            remedy="at least 1, at most the length",
            field="overlong.buffer",
        )
    over = (np.asarray(lengths, np.float64) - (length - buffer)) / buffer
    return (-penalty * np.clip(over, 0.0, 1.0)).astype(np.float32)


def mask_truncated(batch: RolloutBatch) -> RolloutBatch:
    """The batch with every token of its unfinished responses masked (DAPO's overlong filtering, §3.4).

    They keep their rewards, so they still count in what their group is compared with.
    """
    return batch.with_columns(mask=batch.mask & np.repeat(batch.finished, batch.response_lengths))


def equal_reward_groups(batch: RolloutBatch) -> NDArray[np.bool_]:
    """[G] whether all rewards of a group are the same: relative to each other they have no gradient.

    DAPO's dynamic sampling (§3.2) leaves such groups out; it compares plain rewards, so ask before length penalties
    are added. InvalidInput names a sequence whose reward is missing.
    """
    if np.isnan(batch.rewards).any():
        sequence = int(np.flatnonzero(np.isnan(batch.rewards))[0])
        raise InvalidInput(f"sequence {sequence} has no reward", remedy="score every sequence first", field="rewards")
    low, high = np.full(batch.groups, np.inf), np.full(batch.groups, -np.inf)
    np.minimum.at(low, batch.group, batch.rewards)
    np.maximum.at(high, batch.group, batch.rewards)
    equal: NDArray[np.bool_] = low >= high
    return equal


def drop_groups(batch: RolloutBatch, dropped: NDArray[np.bool_]) -> RolloutBatch:
    """The batch without the groups that `dropped` [G] marks; the others stay whole and in order."""
    return batch.select_groups(np.flatnonzero(~np.asarray(dropped, np.bool_)).tolist())
