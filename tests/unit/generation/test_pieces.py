from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import NereusError
from nereus_common.engines.generation.base import Delta, Finish, Piece
from nereus_common.engines.generation.pieces import Pieces

pytestmark = pytest.mark.fast


@given(st.lists(st.integers(0, 7), min_size=1), st.integers(0, 5))
def test_pieces_hold_every_token_once_in_order_and_no_more_than_asked(sizes: list[int], interval: int) -> None:
    pieces, count = Pieces(7, interval), 0
    found: list[Piece] = []
    for turn, size in enumerate(sizes):
        tokens = tuple(range(count, count + size))
        finish = Finish.LENGTH if turn == len(sizes) - 1 else None
        found += pieces.add(Delta(0, tokens, tuple(map(float, tokens)), finish))
        count += size
    assert [token for piece in found for token in piece.token_ids] == list(range(count))
    assert [value for piece in found for value in piece.logprobs] == [float(value) for value in range(count)]
    assert [piece.finish for piece in found] == [None] * (len(found) - 1) + [Finish.LENGTH]
    if interval:
        assert all(len(piece.token_ids) == interval for piece in found[:-1])
        assert len(found[-1].token_ids) <= interval
    else:
        assert len(found) == 1


def test_samples_do_not_mix() -> None:
    pieces = Pieces(1, 0)
    assert not list(pieces.add(Delta(0, (1,), (0.1,))))
    (other,) = pieces.add(Delta(1, (2,), (0.2,), Finish.STOP))
    assert (other.sample, other.token_ids) == (1, (2,))
    (first,) = pieces.add(Delta(0, (3,), (0.3,), Finish.ABORT))
    assert (first.sample, first.token_ids, first.version) == (0, (1, 3), 1)


def test_a_token_without_a_logprob_is_an_error() -> None:
    with pytest.raises(NereusError, match="2 tokens with 1 log-probs"):
        list(Pieces(1, 0).add(Delta(0, (1, 2), (0.1,))))


@pytest.mark.parametrize("interval", [0, 2])
def test_the_rest_of_what_goes_on_elsewhere_is_given_out_without_a_finish(interval: int) -> None:
    pieces = Pieces(4, interval)
    found = [*pieces.add(Delta(0, (1, 2, 3), (0.1, 0.2, 0.3))), *pieces.rest()]
    assert [token for piece in found for token in piece.token_ids] == [1, 2, 3]
    assert {(piece.version, piece.finish) for piece in found} == {(4, None)}
    assert not list(pieces.rest())
