from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.transfer import Box
from nereus_common.state.boxes import (
    are_disjoint,
    cells,
    coalesce,
    covers,
    cut,
    difference,
    elements,
    intersection,
    subtract,
    union,
)

pytestmark = pytest.mark.fast


@st.composite
def boxes(draw: st.DrawFn, dimensions: int = 2) -> Box:
    pairs = [sorted((draw(st.integers(0, 6)), draw(st.integers(0, 6)))) for _ in range(dimensions)]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


regions = st.lists(boxes(), max_size=5)


def points(*region: Box) -> set[tuple[int, ...]]:
    return {
        point for box in region for point in product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True)))
    }


@given(boxes(3), boxes(3))
def test_a_box_without_a_hole_is_the_set_difference_in_disjoint_boxes(box: Box, hole: Box) -> None:
    left = subtract(box, hole)
    assert points(*left) == points(box) - points(hole)
    assert elements(left) == len(points(*left))
    assert len(left) <= 6


@given(regions, regions)
def test_regions_obey_set_algebra(one: list[Box], other: list[Box]) -> None:
    for result, expected in (
        (union(one), points(*one)),
        (difference(one, other), points(*one) - points(*other)),
        (intersection(one, other), points(*one) & points(*other)),
    ):
        assert points(*result) == expected
        assert elements(result) == len(expected)
        assert list(result) == sorted(result)


@given(regions)
def test_disjointness_means_that_no_element_is_in_two_boxes(region: list[Box]) -> None:
    assert are_disjoint(region) == (elements(region) == len(points(*region)))


@given(regions, boxes())
def test_a_region_covers_a_box_when_it_has_every_element(region: list[Box], whole: Box) -> None:
    assert covers(region, whole) == (points(whole) <= points(*region))


@given(boxes(3), st.integers(1, 50))
def test_cut_pieces_are_small_disjoint_and_complete(box: Box, limit: int) -> None:
    pieces = cut(box, limit)
    assert all(0 < piece.elements <= limit for piece in pieces)
    assert elements(pieces) == box.elements
    assert points(*pieces) == points(box)


@given(boxes(3))
def test_coalescing_the_pieces_of_a_box_gives_the_box_back(box: Box) -> None:
    assert coalesce(cut(box, 3)) == ((box,) if box.elements else ())


@given(boxes(), regions)
def test_a_cell_is_inside_or_outside_each_cutter_never_both(box: Box, cutters: list[Box]) -> None:
    found = cells(box, cutters)
    assert points(*found) == points(box)
    assert elements(found) == box.elements
    for cell, cutter in product(found, cutters):
        assert cutter.contains(cell) or cell.intersect(cutter) is None


def test_the_box_of_a_scalar_is_one_element_like_any_other() -> None:
    scalar = Box((), ())
    assert subtract(scalar, scalar) == ()
    assert union([scalar, scalar]) == (scalar,)
    assert cells(scalar, [scalar]) == (scalar,)
    assert cut(scalar, 1) == (scalar,)
    assert covers([scalar], scalar)
    assert not covers([], scalar)


def test_a_piece_of_no_elements_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 elements"):
        cut(Box((0,), (4,)), 0)
