from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import ModelShape
from nereus_common.state.boxes import cut
from nereus_common.state.digest import MASK, _seed, combine, digest_box, digest_bytes, digest_state
from nereus_common.state.oracle import optimizer_tensors, owned_boxes, unit_boxes, whole_boxes
from tests.unit.state.strategies import conventions, hold, indexed, layouts, models

pytestmark = pytest.mark.fast

NAME = TensorName("model.norm.weight")
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def whole(array: np.ndarray, name: str = NAME) -> int:
    return digest_box(TensorName(name), array.shape, Box.whole(array.shape), array)


def random(shape: tuple[int, ...], dtype: type = np.uint16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def splitmix(seed: int, index: int) -> int:
    """The reference: the weight of one index, in Python integers."""
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return (word ^ (word >> 31)) | 1


@given(st.data(), models())
def test_every_layout_of_the_same_state_has_the_same_digest(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    tensors = model.tensors()
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    state = indexed(tensors)
    expected = digest_state(sizes, {name: parts.items() for name, parts in hold(state, whole_boxes(tensors)).items()})
    owned = owned_boxes(unit_boxes(model, data.draw(layouts(model, convention)), convention))
    by_rank = [
        digest_state(sizes, {name: parts.items() for name, parts in hold(state, boxes).items()}) for boxes in owned
    ]
    assert combine(reversed(by_rank)) == expected


@given(shapes, st.integers(1, 20))
def test_the_digests_of_the_pieces_add_up_to_the_digest_of_the_box(shape: tuple[int, ...], limit: int) -> None:
    array, box = random(shape), Box.whole(shape)
    pieces = cut(box, limit)
    assert combine(digest_box(NAME, shape, piece, array[piece.slices]) for piece in pieces) == whole(array)


@given(st.data(), shapes)
def test_one_changed_bit_changes_the_digest(data: st.DataObject, shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        array = random(shape, dtype)
        before = whole(array)
        at = data.draw(st.integers(0, array.size - 1))
        array.reshape(-1)[at] ^= dtype(1 << data.draw(st.integers(0, 8 * array.itemsize - 1)))
        assert whole(array) != before


@given(st.integers(0, 9), st.integers(0, 9))
def test_swapped_rows_and_swapped_columns_change_the_digest(one: int, other: int) -> None:
    array = random((10, 10))
    for axis in (0, 1):
        order = np.arange(10)
        order[[one, other]] = order[[other, one]]
        assert (whole(np.take(array, order, axis)) == whole(array)) == (one == other)


def test_tensors_that_swap_their_content_change_the_digest() -> None:
    a, b = random((4, 6), seed=1), random((4, 6), seed=2)
    assert combine([whole(a, "a"), whole(b, "b")]) != combine([whole(b, "a"), whole(a, "b")])


@given(shapes)
def test_a_missing_zero_is_missed(shape: tuple[int, ...]) -> None:
    zeros = np.zeros(shape, np.uint16)
    pieces = cut(Box.whole(shape), 1)
    sums = [digest_box(NAME, shape, piece, zeros[piece.slices]) for piece in pieces]
    assert all(sums)
    assert len(sums) == 1 or combine(sums[1:]) != combine(sums)


def test_a_box_put_in_the_wrong_place_changes_the_digest() -> None:
    array = random((2, 5))
    places = [Box((row, column), (row + 2, column + 5)) for row in range(9) for column in range(4)]
    assert len({digest_box(NAME, (10, 8), place, array) for place in places}) == len(places)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_the_digest_is_the_sum_that_its_definition_says(dtype: type) -> None:
    array, seed = random((3, 2, 5), dtype), _seed(NAME)
    expected = sum(
        splitmix(seed, 2 * i + j) * splitmix(seed ^ MASK, k) * (int(array[i, j, k]) + 1)
        for i, j, k in np.ndindex(array.shape)
    )
    assert whole(array) == expected & MASK


def test_blocks_leave_no_seam() -> None:
    wide, tall = random((3, 70_001)), random((70_001, 3))
    for array in (wide, tall):
        halves = [Box((0, 0), (1, array.shape[1])), Box((1, 0), array.shape)]
        assert whole(array) == combine(digest_box(NAME, array.shape, box, array[box.slices]) for box in halves)
    assert whole(wide) == combine(
        digest_box(NAME, wide.shape, box, wide[box.slices])
        for box in (Box((0, 0), (3, 65_537)), Box((0, 65_537), (3, 70_001)))
    )


def test_bits_count_whatever_type_they_are_read_as_and_however_they_are_strided() -> None:
    array = random((6, 8), np.uint32)
    assert whole(array.view(np.float32)) == whole(array.view(np.int32)) == whole(array)
    assert whole(np.asfortranarray(array)) == whole(array)
    assert digest_bytes(NAME, array.shape, Box.whole(array.shape), array.tobytes(), 4) == whole(array)
    assert digest_bytes(NAME, array.shape, Box.whole(array.shape), memoryview(array.tobytes()), 4) == whole(array)


def test_values_are_bits_so_minus_zero_is_not_zero_and_nans_are_told_apart() -> None:
    zero, nan = np.zeros(3, np.float32), np.array([np.nan], np.float32)
    assert whole(zero) != whole(-zero)
    other = (nan.view(np.uint32) ^ np.uint32(1)).view(np.float32)
    assert whole(nan) != whole(other)


def test_counters_and_empty_boxes_are_digested_too() -> None:
    assert whole(np.array(10, np.float32)) != whole(np.array(1, np.float32))
    assert digest_box(NAME, (4,), Box((4,), (4,)), np.zeros(0, np.uint16)) == 0
    model = ModelShape("llama", 1, 4, 4, 2, 1, 2, 8, tied=True)
    assert sum(tensor.shape == () for tensor in optimizer_tensors(model).values()) == len(model.tensors())


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"model\.norm\.weight.*not inside"):
        digest_box(NAME, (4,), Box((2,), (5,)), np.zeros(3, np.uint16))
    with pytest.raises(InvalidInput, match=r"shape \(2,\).*shape \(3,\)"):
        digest_box(NAME, (4,), Box((2,), (4,)), np.zeros(3, np.uint16))
    with pytest.raises(InvalidInput, match="complex128"):
        digest_box(NAME, (1,), Box((0,), (1,)), np.zeros(1, np.complex128))
    with pytest.raises(InvalidInput, match="has 4 elements, the buffer 3"):
        digest_bytes(NAME, (4,), Box((0,), (4,)), bytes(6), 2)
    with pytest.raises(InvalidInput, match="3 bytes"):
        digest_bytes(NAME, (4,), Box((0,), (4,)), bytes(12), 3)
