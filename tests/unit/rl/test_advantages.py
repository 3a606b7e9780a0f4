"""Advantages compare a response with the others of its group, and with nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.advantages import group_advantages
from nereus_common.rl.rollouts import RolloutBatch, offsets

pytestmark = pytest.mark.fast


def build(groups: list[list[float]], lengths: list[int]) -> RolloutBatch:
    rewards = [reward for group in groups for reward in group]
    tokens = sum(lengths)
    return RolloutBatch(
        prompt_tokens=np.zeros(len(groups), np.int32),
        prompt_offsets=offsets([1] * len(groups)),
        position=np.arange(len(groups), dtype=np.int64),
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
        response_tokens=np.zeros(tokens, np.int32),
        response_offsets=offsets(lengths),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        mask=np.ones(tokens, np.bool_),
        finished=np.ones(len(rewards), np.bool_),
        rewards=np.array(rewards, np.float32),
        advantages=np.full(tokens, np.nan, np.float32),
    )


def test_advantages_are_centred_scaled_and_the_same_on_every_token() -> None:
    batch = build([[0, 1], [2, 2, 5]], [1, 2, 1, 1, 3])
    found = group_advantages(batch, epsilon=0)
    expected = [-1, 1, 1, *[-1 / np.sqrt(2)] * 2, *[np.sqrt(2)] * 3]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_without_scaling_only_the_mean_is_taken_off() -> None:
    found = group_advantages(build([[0, 1], [2, 2, 5]], [1] * 5), scale_by_std=False)
    np.testing.assert_allclose(found, [-0.5, 0.5, -1, -1, 2], rtol=1e-6)


@pytest.mark.parametrize("groups", [[[3.0]], [[1.0, 1.0, 1.0]]])
def test_a_group_without_contrast_has_no_advantage(groups: list[list[float]]) -> None:
    found = group_advantages(build(groups, [2] * len(groups[0])))
    assert (found == 0).all()


def test_an_unscored_sequence_is_named() -> None:
    with pytest.raises(InvalidInput, match="sequence 1 has reward nan"):
        group_advantages(build([[0, np.nan]], [1, 1]))
