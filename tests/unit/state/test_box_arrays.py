from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.transfer import Box
from nereus_common.state import box_arrays, boxes
from nereus_common.state.box_arrays import BoxArray

pytestmark = pytest.mark.fast


@st.composite
def box(draw: st.DrawFn, dimensions: int) -> Box:
    pairs = [sorted(draw(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True))) for _ in range(dimensions)]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def regions(draw: st.DrawFn) -> list[Box]:
    dimensions = draw(st.integers(0, 3))
    return draw(st.lists(box(dimensions), min_size=1, max_size=6))


def back(rows: BoxArray, dimensions: int) -> list[Box]:
    return [
        Box(tuple(start[:dimensions]), tuple(stop[:dimensions]))
        for start, stop in zip(rows.start.tolist(), rows.stop.tolist(), strict=True)
    ]


@given(regions())
def test_boxes_filled_up_to_more_dimensions_keep_their_elements_and_overlaps(region: list[Box]) -> None:
    rows = BoxArray.of(region, 4)
    assert rows.elements.tolist() == [one.elements for one in region]
    pairs = list(zip(*(found.tolist() for found in box_arrays.overlaps(rows, rows)), strict=True))
    assert pairs == [(i, j) for i, a in enumerate(region) for j, b in enumerate(region) if a.intersect(b)]
    one, other = (np.array(side) for side in zip(*pairs, strict=True))
    parts = box_arrays.common(rows.take(one), rows.take(other))
    assert back(parts, len(region[0].start)) == [region[i].intersect(region[j]) for i, j in pairs]
    assert box_arrays.are_disjoint(rows) == boxes.are_disjoint(region)


@given(regions(), st.lists(st.integers(1, 40), min_size=6, max_size=6))
def test_many_boxes_are_cut_as_each_alone_is(region: list[Box], limits: list[int]) -> None:
    pieces, origin = box_arrays.cut(BoxArray.of(region, 3), np.array(limits[: len(region)]))
    found = back(pieces, len(region[0].start))
    for number, (one, limit) in enumerate(zip(region, limits, strict=False)):
        mine = sorted(piece for piece, of in zip(found, origin.tolist(), strict=True) if of == number)
        assert mine == sorted(boxes.cut(one, limit))


@given(regions(), st.data())
def test_joining_is_coalescing_within_each_key(region: list[Box], data: st.DataObject) -> None:
    pieces = [piece for one in boxes.union(region) for piece in boxes.cut(one, 4)]
    key = data.draw(st.lists(st.integers(0, 1), min_size=len(pieces), max_size=len(pieces)))
    joined, origin = box_arrays.join(BoxArray.of(pieces, 3), np.array(key))
    found = back(joined, len(region[0].start))
    for number in (0, 1):
        mine = sorted(one for one, of in zip(found, origin.tolist(), strict=True) if key[of] == number)
        assert mine == list(boxes.coalesce(one for one, of in zip(pieces, key, strict=True) if of == number))
