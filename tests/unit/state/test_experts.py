from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan, UnsupportedByEngine
from nereus_common.core.ids import TensorName
from nereus_common.core.layout import Layout
from nereus_common.state.architecture import Experts, ModelShape
from nereus_common.state.conventions import GENERATION, TRAINING
from nereus_common.state.experts import chunked_experts, even_experts, expert_degrees, expert_share
from nereus_common.state.oracle import optimizer_tensors, shard_boxes, unit_boxes

pytestmark = pytest.mark.fast

EIGHT = ModelShape("qwen3_moe", 1, 16, 24, 8, 8, 2, 64, tied=False, experts=Experts(count=8, ffn=16, layers=(0,)))
UP = "model.layers.0.mlp.experts.{}.up_proj.weight"
DOWN = "model.layers.0.mlp.experts.{}.down_proj.weight"


def held(layout: str, name: str, experts: int = 8) -> list[dict[int, tuple[tuple[int, int], ...]]]:
    """Of each rank: expert → its rows and columns of the matrix."""
    ranks = unit_boxes(EIGHT, Layout.parse(layout), TRAINING)
    return [
        {
            expert: tuple(zip(box.start, box.stop, strict=True))
            for expert in range(experts)
            for box in boxes.get(TensorName(name.format(expert)), ())
        }
        for boxes in ranks
    ]


def test_without_expert_parallelism_an_expert_is_cut_as_a_dense_layer_is() -> None:
    assert [sorted(rank) for rank in held("tp2.pp1.fs2", UP)] == [list(range(8))] * 4
    assert [rank[3] for rank in held("tp2.pp1.fs2", UP)] == [
        ((0, 4), (0, 16)),
        ((8, 12), (0, 16)),
        ((4, 8), (0, 16)),
        ((12, 16), (0, 16)),
    ]


def test_ep_equal_to_fs_gives_each_fs_index_its_own_experts_cut_over_tp() -> None:
    ranks = held("tp2.pp1.fs2.ep2", DOWN)
    assert [sorted(rank) for rank in ranks] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [rank[4] for rank in ranks[2:]] == [((0, 16), (0, 8)), ((0, 16), (8, 16))]


def test_ep_over_all_ranks_of_a_stage_gives_each_whole_experts() -> None:
    ranks = held("tp2.pp1.fs2.ep4", UP)
    assert [sorted(rank) for rank in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(box == ((0, 16), (0, 16)) for rank in ranks for box in rank.values())


def test_neighbours_hold_different_experts_and_those_who_share_them_cut_their_rows() -> None:
    ranks = held("tp1.pp1.fs4.ep2", UP)
    assert [sorted(rank) for rank in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert [rank[min(rank)] for rank in ranks] == [((0, 8), (0, 16))] * 2 + [((8, 16), (0, 16))] * 2


def test_an_ep_that_divides_neither_fs_nor_tp_still_covers_every_expert_once() -> None:
    layout = Layout.parse("tp2.pp1.fs3.ep3")
    assert expert_degrees(layout) == (2, 1)
    assert expert_degrees(Layout(tp=3, fs=2, ep=3)) == (1, 2)
    assert [expert_share(layout, layout.coordinate(rank))[0] for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_ranks_of_a_stage_are_a_grid_of_shards_experts_and_parts(tp: int, fs: int, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([ep for ep in range(1, tp * fs + 1) if tp * fs % ep == 0]))
    layout = Layout(tp=tp, fs=fs, ep=ep)
    places = [expert_share(layout, layout.coordinate(rank)) for rank in range(tp * fs)]
    assert len(set(places)) == tp * fs
    assert Counter(index for index, _ in places) == dict.fromkeys(range(ep), tp * fs // ep)


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_expert_has_one_expert_parallel_index(experts: int, ep: int) -> None:
    for placement in (chunked_experts, even_experts):
        held = [expert for index in range(ep) for expert in placement(experts, ep, index)]
        assert held == list(range(experts))


def test_training_chunks_experts_as_torch_does_and_serving_spreads_them_as_vllm_does() -> None:
    assert [len(chunked_experts(10, 4, index)) for index in range(4)] == [3, 3, 3, 1]
    assert [len(even_experts(10, 4, index)) for index in range(4)] == [3, 3, 2, 2]
    assert [len(chunked_experts(5, 4, index)) for index in range(4)] == [2, 2, 1, 0]


def test_the_state_of_an_expert_is_where_the_expert_is_its_step_counter_too() -> None:
    ranks = unit_boxes(EIGHT, Layout(fs=4, ep=4), TRAINING, tensors=optimizer_tensors(EIGHT))
    step = [[f"{UP.format(expert)}:step" in boxes for expert in range(8)] for boxes in ranks]
    assert step == [[expert // 2 == rank for expert in range(8)] for rank in range(4)]
    assert all("model.layers.0.mlp.gate.weight:step" in boxes for boxes in ranks)


@pytest.mark.parametrize(
    ("changes", "convention", "layout", "kind", "words"),
    [
        ({"experts": None}, TRAINING, "tp2.pp1.fs1.ep2", InvalidPlan, "no experts"),
        ({}, TRAINING, "tp1.pp1.fs16.ep16", InvalidPlan, "8 experts in a layer"),
        ({"experts": Experts(8, 18, (0,))}, TRAINING, "tp4.pp1.fs1", InvalidPlan, "width of an expert is 18"),
        ({"experts": Experts(8, 16, (0,), 6)}, TRAINING, "tp4.pp1.fs1", InvalidPlan, "shared_expert"),
        ({}, GENERATION, "tp4.pp1.fs1.ep2", UnsupportedByEngine, "ep can be 1 or 4"),
    ],
)
def test_a_layout_that_cannot_hold_the_experts_is_refused_by_name(
    changes: dict[str, object], convention: object, layout: str, kind: type[Exception], words: str
) -> None:
    model = replace(EIGHT, **changes)  # type: ignore[arg-type]
    with pytest.raises(kind, match=words):
        shard_boxes(model, Layout.parse(layout), 0, convention)  # type: ignore[arg-type]


def test_an_expert_too_narrow_for_tp_may_be_spread_instead_of_cut() -> None:
    narrow = replace(EIGHT, experts=Experts(8, 18, (0,)))
    assert shard_boxes(narrow, Layout(tp=4, ep=4), 0, TRAINING)
    assert TRAINING.allowed_tp(narrow) == (1, 2)


def test_a_dense_width_that_no_layer_has_limits_no_layout() -> None:
    assert TRAINING.allowed_tp(replace(EIGHT, ffn=7)) == (1, 2, 4, 8)
