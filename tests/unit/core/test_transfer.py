from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef, Transfer, TransferProgram

pytestmark = pytest.mark.fast


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    pairs = [sorted((draw(st.integers(0, 5)), draw(st.integers(0, 5)))) for _ in range(2)]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def mask(box: Box) -> np.ndarray:
    cells = np.zeros((5, 5), bool)
    cells[box.slices] = True
    return cells


@given(boxes(), boxes())
def test_boxes_intersect_and_contain_as_sets_do(one: Box, other: Box) -> None:
    common = one.intersect(other)
    both = mask(one) & mask(other)
    assert (common is None) == (not both.any())
    if common is not None:
        assert (mask(common) == both).all()
        assert one.contains(common)
        inside = np.arange(25).reshape(5, 5)[one.slices][common.relative_to(one).slices]
        assert (inside == np.arange(25).reshape(5, 5)[common.slices]).all()
    assert mask(one).sum() == one.elements
    if one.contains(other):
        assert (mask(one) | ~mask(other)).all()


def test_a_scalar_has_one_element_and_a_box_prints_its_spans() -> None:
    assert Box.whole(()).elements == 1
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert str(Box((0, 3), (2, 5))) == "[0:2,3:5]"


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,))])
def test_what_is_no_rectangle_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="hyper-rectangle"):
        Box(start, stop)


def test_a_program_counts_its_bytes_and_gives_each_target_its_part() -> None:
    source, one, two = RankRef("s", 0), RankRef("t", 0), RankRef("t", 1)
    name = TensorName("w")
    transfers = (Transfer(name, Box((0,), (3,)), source, one), Transfer(name, Box((3,), (8,)), source, two))
    program = TransferProgram(transfers, "bfloat16", 2)
    assert program.bytes == 16
    assert program.for_target(two) == transfers[1:]
    assert program.for_target(source) == ()


def test_a_program_is_the_same_from_columns_as_from_objects_and_sums_its_links() -> None:
    a, b, t = RankRef("a", 0), RankRef("b", 0), RankRef("t", 1)
    transfers = (
        Transfer(TensorName("w"), Box((0, 2), (3, 4)), a, t),
        Transfer(TensorName("w"), Box((3, 2), (4, 4)), b, t, 1),
        Transfer(TensorName("w:step"), Box((), ()), a, t, 1),
        Transfer(TensorName("n"), Box((1,), (5,)), a, RankRef("u", 0)),
    )
    program = TransferProgram(transfers, "float32", 4)
    assert program.transfers == transfers
    assert TransferProgram(program.columns, "float32", 4) == program != TransferProgram(transfers[:3], "float32", 4)
    assert program.bytes_by_link() == {(a, t): 28, (b, t): 8, (a, RankRef("u", 0)): 16}
    assert program.for_unit("t") == transfers[:3]
    assert len(program) == 4


def test_an_empty_program_moves_nothing() -> None:
    program = TransferProgram((), "float32", 4)
    assert (program.transfers, program.bytes, program.bytes_by_link(), len(program)) == ((), 0, {}, 0)
