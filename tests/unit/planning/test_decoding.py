"""Segments of decoding against decoding token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.planning.decoding import segments

pytestmark = pytest.mark.fast

batches = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=25)


def token_by_token(lengths: list[tuple[int, int]], slots: int) -> list[tuple[int, int]]:
    """(sequences, positions looked back on) of each iteration."""
    waiting, running, seen = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            prompt, response = waiting.pop(0)
            running.append([prompt, response])
        for one in running:
            one[0] += 1
            one[1] -= 1
        seen.append((len(running), sum(context for context, _ in running)))
        running = [one for one in running if one[1]]
    return seen


@given(batches, st.integers(1, 8))
def test_segments_sum_up_every_iteration(lengths: list[tuple[int, int]], slots: int) -> None:
    found, seen = segments(lengths, slots), token_by_token(lengths, slots)
    assert found.total_iterations == len(seen)
    assert found.tokens == sum(active for active, _ in seen) == sum(response for _, response in lengths)
    assert (found.context * found.iterations).sum() == pytest.approx(sum(context for _, context in seen))
    spread = [
        (active, 1) for active, count in zip(found.active, found.iterations, strict=True) for _ in range(int(count))
    ]
    assert [active for active, _ in spread] == [active for active, _ in seen]


def test_more_slots_than_sequences_take_as_long_as_the_longest_response() -> None:
    assert segments([(5, 3), (9, 7), (0, 7)], slots=64).total_iterations == 7


def test_an_empty_batch_takes_nothing() -> None:
    assert segments([], 4).total_iterations == 0


@pytest.mark.parametrize(
    ("lengths", "slots", "field"),
    [([(3, 0)], 2, "lengths"), ([(-1, 2)], 2, "lengths"), ([], 0, "generation.max_sequences")],
)
def test_what_cannot_be_decoded_is_refused(lengths: list[tuple[int, int]], slots: int, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        segments(lengths, slots)
    assert refused.value.details["field"] == field
