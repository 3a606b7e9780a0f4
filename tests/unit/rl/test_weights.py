"""Each token's share in the loss of its minibatch, given out once, over the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import Aggregation, cut_minibatches, loss_weights, minibatch_tokens
from tests.unit.rl.batches import make_batch, owners

pytestmark = pytest.mark.fast


@st.composite
def batches(draw: st.DrawFn) -> tuple[RolloutBatch, int]:
    """Groups of different sizes, some tokens and some whole sequences masked, cut into minibatches."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    lengths = draw(st.lists(st.integers(1, 4), min_size=sum(sizes), max_size=sum(sizes)))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    minibatches = draw(st.integers(1, len(sizes)))
    batch = make_batch([[0.0] * size for size in sizes], lengths, mask=mask)
    return batch.with_columns(minibatch=cut_minibatches(len(sizes), minibatches)), minibatches


@given(batches(), st.sampled_from(["token", "sequence"]))
def test_the_weights_of_a_minibatch_sum_to_one(case: tuple[RolloutBatch, int], aggregation: Aggregation) -> None:
    batch, minibatches = case
    weights = loss_weights(batch, minibatches, aggregation)
    assert (weights[~batch.mask] == 0).all() and (weights[batch.mask] > 0).all()
    for minibatch, tokens in enumerate(minibatch_tokens(batch, minibatches)):
        total = float(weights[owners(batch) == minibatch].sum())
        assert total == pytest.approx(1.0 if tokens else 0.0, abs=1e-6)


@given(batches())
def test_minibatch_tokens_are_the_unmasked_ones_and_add_up(case: tuple[RolloutBatch, int]) -> None:
    batch, minibatches = case
    assert sum(minibatch_tokens(batch, minibatches)) == batch.loss_tokens


@given(batches())
def test_a_constant_weighs_every_unmasked_token_alike(case: tuple[RolloutBatch, int]) -> None:
    batch, minibatches = case
    weights = loss_weights(batch, minibatches, "constant", longest=50)
    sequences = np.bincount(batch.minibatch[batch.group], minlength=minibatches)[owners(batch)]
    np.testing.assert_allclose(weights, batch.mask / (sequences * 50), rtol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40))
def test_minibatches_are_contiguous_and_of_almost_equal_size(groups: int, minibatches: int) -> None:
    minibatches = min(groups, minibatches)
    cut = cut_minibatches(groups, minibatches)
    sizes = np.bincount(cut, minlength=minibatches)
    assert (np.diff(cut) >= 0).all() and sizes.sum() == groups and len(sizes) == minibatches
    assert sizes.max() - sizes.min() <= 1


def test_weights_of_each_aggregation() -> None:
    batch = make_batch([[0, 0, 0]], [2, 3, 1], mask=[1, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(loss_weights(batch, 1, "token"), [1 / 3, 1 / 3, 1 / 3, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(loss_weights(batch, 1, "sequence"), [1 / 4, 1 / 4, 1 / 2, 0, 0, 0], rtol=1e-6)
    found = loss_weights(batch, 1, "constant", longest=4)
    np.testing.assert_allclose(found, [1 / 12, 1 / 12, 1 / 12, 0, 0, 0], rtol=1e-6)


def test_a_constant_needs_a_length() -> None:
    with pytest.raises(InvalidInput, match="a constant of 0 tokens"):
        loss_weights(make_batch([[0.0]], [1]), 1, "constant")
