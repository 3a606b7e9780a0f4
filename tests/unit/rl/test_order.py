"""The sample order is a pure function of (seed, epoch, position)."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.order import SampleOrder, shares, step_positions

pytestmark = pytest.mark.fast

sizes = st.integers(1, 600)
seeds = st.integers(0, 2**63)


@given(sizes, seeds, st.integers(0, 5))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    assert sorted(order.indices(range(epoch * size, (epoch + 1) * size))) == list(range(size))


@settings(max_examples=20)
@given(st.integers(50, 200), seeds)
def test_epochs_and_seeds_differ(size: int, seed: int) -> None:
    first, second = range(size), range(size, 2 * size)
    order = SampleOrder(size, seed)
    assert order.indices(first) != order.indices(second)
    assert order.indices(first) != SampleOrder(size, seed + 1).indices(first)


@settings(max_examples=60)
@given(sizes, seeds, st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_no_sequence_of_data_parallel_degrees_skips_or_repeats_a_prompt(
    size: int, seed: int, batch: int, degrees: list[int]
) -> None:
    order = SampleOrder(size, seed)
    consumed = [
        index
        for step, degree in enumerate(degrees)
        for share in shares(step_positions(step, batch), degree)
        for index in order.indices(share)
    ]
    assert consumed == order.indices(range(len(degrees) * batch))


def test_growing_from_one_rank_to_two_continues_at_the_fifth_sample() -> None:
    assert shares(step_positions(1, 4), 2) == (range(4, 6), range(6, 8))


def test_growing_from_two_ranks_to_three_continues_the_same_permutation_and_the_tail_joins_the_next_epoch() -> None:
    order = SampleOrder(26, 7)
    degrees = [2, 2, 3, 3, 3]
    steps = [shares(step_positions(step, 6), degree) for step, degree in enumerate(degrees)]
    assert steps[2] == (range(12, 14), range(14, 16), range(16, 18))
    seen = [order.index(position) for position in chain.from_iterable(chain.from_iterable(steps))]
    assert sorted(seen[:26]) == list(range(26))
    assert seen[26:] == order.indices(range(26, 30))


@given(st.integers(0, 200), st.integers(1, 30))
def test_shares_cover_the_batch_and_differ_by_at_most_one(count: int, degree: int) -> None:
    cut = shares(range(5, 5 + count), degree)
    assert [position for share in cut for position in share] == list(range(5, 5 + count))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


FIRST_TWENTY = [6, 1, 0, 9, 2, 7, 4, 3, 8, 5, 3, 2, 5, 7, 0, 4, 1, 6, 9, 8]


def test_the_order_never_changes_between_versions() -> None:
    assert SampleOrder(10, 0).indices(range(20)) == FIRST_TWENTY


@pytest.mark.parametrize(("size", "position"), [(0, 0), (4, -1)])
def test_an_empty_set_and_a_negative_position_are_refused(size: int, position: int) -> None:
    with pytest.raises(InvalidInput):
        SampleOrder(size, 1).index(position)
