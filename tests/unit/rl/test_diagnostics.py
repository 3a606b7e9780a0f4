"""How much the critic explains and how old the samples are, over unmasked tokens only."""

from __future__ import annotations

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.diagnostics import explained_variance, staleness
from tests.unit.rl.batches import make_batch

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 4, 9], 1.0), ([0, 1, 3, 9], 1.0), ([5, 5, 5, 9], 0.0), ([-1, -2, -4, 9], -3.0), ([1, 2, 4, np.nan], 1.0)],
)
def test_a_critic_is_measured_by_the_variance_it_leaves(values: list[float], expected: float) -> None:
    batch = make_batch([[0, 0]], [2, 2], values=values, returns=[1, 2, 4, -50], mask=[1, 1, 1, 0])
    assert explained_variance(batch) == pytest.approx(expected, abs=1e-6)


def test_where_returns_do_not_vary_nothing_is_explained() -> None:
    assert explained_variance(make_batch([[0]], [2], values=[0, 1], returns=[3, 3])) == 0
    assert explained_variance(make_batch([[0]], [1], values=[0], returns=[3], mask=[0])) == 0


def test_explained_variance_needs_values_and_returns() -> None:
    with pytest.raises(InvalidInput, match="column returns"):
        explained_variance(make_batch([[0]], [1], values=[0]))


def test_a_sample_is_as_old_as_its_oldest_unmasked_token() -> None:
    batch = make_batch([[0, 0], [0]], [2, 3, 1], versions=[5, 4, 3, -1, 5, 9], mask=[1, 1, 1, 0, 1, 0])
    assert staleness(batch, 6) == (3, 2.5)


def test_without_sampled_tokens_nothing_is_stale() -> None:
    assert staleness(make_batch([], []), 3) == (0, 0.0)
    assert staleness(make_batch([[0]], [2], mask=[0, 0]), 3) == (0, 0.0)
