from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.transport.chunking import Piece, all_finite, cut_box, plan_chunks

pytestmark = pytest.mark.fast


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    start = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return Box(start, tuple(a + draw(st.integers(0, 6)) for a in start))


def cells(box: Box) -> set[tuple[int, ...]]:
    return {tuple(int(i) + a for i, a in zip(index, box.start, strict=True)) for index in np.ndindex(box.shape)}


@given(boxes(), st.integers(1, 50))
def test_pieces_of_a_box_are_small_enough_and_cover_every_element_once_in_order(box: Box, limit: int) -> None:
    pieces = list(cut_box(box, limit))
    assert all(0 < piece.elements <= limit for piece in pieces)
    flat = [cell for piece in pieces for cell in sorted(cells(piece))]
    assert flat == sorted(cells(box))


@given(st.lists(boxes(), max_size=8), st.sampled_from([1, 2, 4, 8]), st.integers(8, 200))
def test_chunks_hold_every_piece_once_and_never_more_than_a_buffer(items: list[Box], size: int, limit: int) -> None:
    pieces = [Piece(TensorName(f"t{number}"), box) for number, box in enumerate(items)]
    chunks = plan_chunks(pieces, size, limit)
    assert all(0 < chunk.nbytes <= limit for chunk in chunks)
    assert all(chunk.nbytes == size * sum(piece.box.elements for piece in chunk.pieces) for chunk in chunks)
    sent = sorted((piece.tensor, cell) for chunk in chunks for piece in chunk.pieces for cell in cells(piece.box))
    assert sent == sorted((piece.tensor, cell) for piece in pieces for cell in cells(piece.box))


def test_small_tensors_share_a_chunk_and_large_ones_travel_alone() -> None:
    small = [Piece(TensorName(f"norm{number}"), Box((0,), (10,))) for number in range(5)]
    large = Piece(TensorName("weight"), Box((0, 0), (10, 10)))
    chunks = plan_chunks([*small[:2], large, *small[2:]], 2, 200)
    assert [[piece.tensor for piece in chunk.pieces] for chunk in chunks] == [
        ["weight"],
        ["norm0", "norm1", "norm2", "norm3", "norm4"],
    ]


def test_items_of_an_unknown_size_are_refused() -> None:
    with pytest.raises(InvalidInput, match="3 bytes"):
        plan_chunks([], 3, 1024)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("bfloat16", 0x7F7F, 0x7F80),
        ("bfloat16", 0xFF7F, 0xFFC1),
        ("float16", 0x7BFF, 0x7C00),
        ("float32", 0x7F7FFFFF, 0xFF800000),
        ("float64", 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000001),
    ],
)
def test_infinities_and_nans_are_told_from_the_largest_numbers(dtype: str, good: int, bad: int) -> None:
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
    words = np.array([0, good, 1], f"u{size}")
    assert all_finite(words.view(np.uint8), dtype)
    words[1] = bad
    assert not all_finite(words.view(np.uint8), dtype)
    assert all_finite(words.view(np.uint8), "int8")
