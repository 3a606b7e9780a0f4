"""What is done to a scored batch before advantages: length penalties, masks, groups left out."""

from __future__ import annotations

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.advantages import estimate
from nereus_common.rl.shaping import drop_groups, equal_reward_groups, mask_truncated, overlong_penalty
from tests.unit.rl.batches import make_batch

pytestmark = pytest.mark.fast


def test_the_overlong_penalty_is_nothing_then_a_line_then_whole() -> None:
    found = overlong_penalty(np.array([1, 60, 61, 80, 99, 100, 150]), length=100, buffer=40, penalty=2.0)
    np.testing.assert_allclose(found, [0, 0, -0.05, -1, -1.95, -2, -2], rtol=1e-6)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(InvalidInput, match="overlong buffer"):
        overlong_penalty(np.array([1]), length=100, buffer=buffer, penalty=1.0)


def test_truncated_responses_leave_the_loss_but_not_their_groups_baseline() -> None:
    batch = make_batch([[1, 0]], [2, 3], finished=[True, False], mask=[1, 0, 1, 1, 1])
    found = mask_truncated(batch)
    assert found.mask.tolist() == [True, False, False, False, False]
    scored = estimate(found, {"name": "group", "scale_by_std": False})
    assert scored.advantages.tolist() == [0.5, 0, 0, 0, 0]


def test_groups_of_equal_rewards_are_those_whose_advantages_are_all_zero() -> None:
    batch = make_batch([[1, 1, 1], [0, 1], [0.1], [0.1, 0.1]], [1] * 8)
    equal = equal_reward_groups(batch)
    assert equal.tolist() == [True, False, True, True]
    advantages = estimate(batch, {"name": "group"}).advantages
    assert (advantages[equal[batch.group]] == 0).all() and (advantages[~equal[batch.group]] != 0).all()


def test_an_unscored_group_is_neither_equal_nor_unequal() -> None:
    with pytest.raises(InvalidInput, match="sequence 2 has no reward"):
        equal_reward_groups(make_batch([[1, 1], [np.nan, 0]], [1] * 4))


def test_dropped_groups_leave_the_others_whole_and_in_order() -> None:
    batch = make_batch([[1, 2], [3, 3], [4]], [1, 2, 1, 1, 3])
    found = drop_groups(batch, np.array([False, True, False]))
    assert found.position.tolist() == [0, 2] and found.rewards.tolist() == [1, 2, 4]
    assert found.group.tolist() == [0, 0, 1] and found.response_lengths.tolist() == [1, 2, 3]
    assert drop_groups(batch, np.ones(3, bool)).sequences == 0
