"""Group-relative advantages (GRPO; Shao et al. 2024, DeepSeekMath, §4.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch


def group_advantages(batch: RolloutBatch, *, scale_by_std: bool = True, epsilon: float = 1e-4) -> NDArray[np.float32]:
    """[R] per-token advantages: (reward − group mean) / (group standard deviation + epsilon), the same on every token.

    The deviation is the population's, so a group of one has advantage 0. `scale_by_std=False` leaves the division
    out (Dr. GRPO). InvalidInput when a reward is missing or not finite.
    """
    rewards = batch.rewards.astype(np.float64)
    if not np.isfinite(rewards).all():
        sequence = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise InvalidInput(
            f"sequence {sequence} has reward {rewards[sequence]}",
            remedy="score every sequence before computing advantages",
            field="rewards",
        )
    size = np.maximum(np.bincount(batch.group, minlength=batch.groups), 1)
    mean = np.bincount(batch.group, rewards, minlength=batch.groups) / size
    centred = rewards - mean[batch.group]
    if scale_by_std:
        variance = np.bincount(batch.group, centred**2, minlength=batch.groups) / size
        centred = centred / (np.sqrt(variance)[batch.group] + epsilon)
    return np.repeat(centred, batch.response_lengths).astype(np.float32)
