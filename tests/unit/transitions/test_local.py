"""The chain of primitives, and that one direct move is never worse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.layout import Layout
from nereus_common.transitions.dag import Primitive
from nereus_common.transitions.local import chain_cost, common_layout, direct_chain, local_chain, primitive_between
from tests.unit.transitions.jobs import ACTOR, pool, stage

pytestmark = pytest.mark.fast
layouts = st.builds(Layout, *[st.sampled_from([1, 2, 3, 4])] * 3)


def held(layout: Layout, rank: int) -> int:
    return 1728 // layout.ranks  # 1,728 = 12³: every layout here divides it


@pytest.mark.parametrize(
    ("old", "new", "primitive"),
    [
        ("tp2.pp1.fs1", "tp1.pp1.fs1", Primitive.SPLIT),
        ("tp1.pp2.fs1", "tp2.pp2.fs1", Primitive.MERGE),
        ("tp2.pp1.fs1", "tp3.pp1.fs1", Primitive.RESHARD),
        ("tp4.pp1.fs1", "tp2.pp2.fs1", Primitive.RESHARD),
        ("tp2.pp2.fs1", "tp2.pp2(15+15).fs1", Primitive.EXTEND),
        ("tp1.pp2(10+20).fs1", "tp1.pp4.fs1", Primitive.RESHARD),
    ],
)
def test_a_move_is_named_by_which_layout_is_made_of_the_other(old: str, new: str, primitive: Primitive) -> None:
    assert primitive_between(Layout.parse(old), Layout.parse(new), 30) is primitive


def test_pipelines_whose_cuts_differ_have_no_stage_in_common() -> None:
    four, two = Layout(pp=4), Layout(pp=2)
    assert common_layout(four, two).pp == 2
    assert common_layout(four, two, 30).pp == 1  # 8+8+7+7 is not cut at 15


@given(layouts, layouts)
def test_both_layouts_are_made_of_the_common_one(one: Layout, other: Layout) -> None:
    common = common_layout(one, other, 12)
    assert common == common_layout(other, one, 12)
    assert all(layout.ranks % common.ranks == 0 for layout in (one, other))


@given(layouts, layouts, st.integers(0, 20))
def test_a_direct_move_receives_no_more_and_peaks_no_higher_than_the_chain(
    one: Layout, other: Layout, shift: int
) -> None:
    devices = pool(160)
    old = stage(ACTOR, one, devices[: 2 * one.ranks])
    new = stage(ACTOR, other, devices[shift : shift + 2 * other.ranks])
    chain_bytes, chain_peaks = chain_cost(old, local_chain(old, new, 12), held)
    direct_bytes, direct_peaks = chain_cost(old, direct_chain(old, new, 12), held)
    assert direct_bytes <= chain_bytes
    assert max(direct_peaks.values()) <= max(chain_peaks.values())


def test_the_chain_runs_split_destroy_extend_merge() -> None:
    devices = pool(8)
    old, new = stage(ACTOR, "tp2.pp1.fs1", devices[:4]), stage(ACTOR, "tp3.pp1.fs1", devices[2:8])
    order = [link.primitive for link in local_chain(old, new)]
    assert order == [Primitive.SPLIT, Primitive.DESTROY, Primitive.EXTEND, Primitive.MERGE]
