from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.layout import Coordinate, Layout, parse_replicated

pytestmark = pytest.mark.fast


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, fs = (draw(st.integers(1, 9)) for _ in range(3))
    split = draw(st.none() | st.lists(st.integers(1, 40), min_size=pp, max_size=pp).map(tuple))
    ep = draw(st.sampled_from([degree for degree in range(1, tp * fs + 1) if tp * fs % degree == 0]))
    return Layout(tp, pp, fs, ep, split)


@given(layouts(), st.integers(1, 20))
def test_a_layout_is_parsed_from_what_it_prints(layout: Layout, replicas: int) -> None:
    assert Layout.parse(str(layout)) == layout
    assert parse_replicated(f"{layout} x{replicas}") == (layout, replicas)
    assert parse_replicated(str(layout)) == (layout, 1)


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one_outermost_first(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.ranks)]
    order = product(range(layout.pp), range(layout.fs), range(layout.tp))
    assert places == [Coordinate(*place) for place in order]
    assert [layout.rank(place) for place in places] == list(range(layout.ranks))


@given(st.integers(1, 9), st.integers(1, 100))
def test_layers_are_split_evenly_completely_and_in_order(pp: int, layers: int) -> None:
    layout = Layout(pp=pp)
    if pp > layers:
        with pytest.raises(InvalidPlan, match=f"the model has {layers}"):
            layout.layer_counts(layers)
        return
    counts = layout.layer_counts(layers)
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)
    assert [layer for stage in layout.layer_ranges(layers) for layer in stage] == list(range(layers))


def test_layouts_are_written_as_people_write_them() -> None:
    assert str(Layout(tp=2, fs=2)) == "tp2.pp1.fs2"
    assert str(Layout(tp=2, pp=2, fs=2, ep=4, split=(16, 14))) == "tp2.pp2(16+14).fs2.ep4"
    assert Layout.parse(" tp2.pp2(16+14).fs1 ").layer_ranges(30) == (range(16), range(16, 30))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp2", "not understood.*write tp2.pp1.fs2"),
        ("tp2.pp1.fs2 extra", "not understood"),
        ("tp0.pp1.fs1", "layout.tp is 0"),
        ("tp1.pp1.fs0", "layout.fs is 0"),
        ("tp2.pp1.fs1.ep3", "ep3 does not divide the 2 ranks"),
        ("tp1.pp2(3).fs1", r"split \(3,\)"),
        ("tp1.pp2(3+0).fs1", "at least one layer"),
        ("tp1.pp2(+).fs1", "at least one layer"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_by_field(text: str, words: str) -> None:
    with pytest.raises(InvalidPlan, match=words) as caught:
        Layout.parse(text)
    assert caught.value.details["field"] in {"layout", "tp", "fs", "ep", "split"}


def test_replicas_ranks_and_splits_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="replicas"):
        parse_replicated("tp1.pp1.fs1 xmany")
    with pytest.raises(InvalidPlan, match="no rank 2"):
        Layout(tp=2).coordinate(2)
    with pytest.raises(InvalidPlan, match=r"7\+7 layers.*has 30"):
        Layout(pp=2, split=(7, 7)).layer_counts(30)
