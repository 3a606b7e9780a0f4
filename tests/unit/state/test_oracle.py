from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan, UnsupportedByEngine
from nereus_common.core.ids import Head, Stage, TensorName
from nereus_common.core.layout import Coordinate, Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import Home, LogicalTensor, ModelShape, Rule
from nereus_common.state.boxes import are_disjoint, covers, difference, elements
from nereus_common.state.conventions import GENERATION, TRAINING, Convention, convention_of, vllm_layers, whole
from nereus_common.state.oracle import (
    layers_of,
    optimizer_tensors,
    owned_boxes,
    shard_boxes,
    slot_name,
    unit_boxes,
    whole_boxes,
)
from tests.unit.state.index_model import holds
from tests.unit.state.strategies import conventions, layouts, models

pytestmark = pytest.mark.fast

SMOLLM2 = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, tied=True)
EMBEDDING = TensorName("model.embed_tokens.weight")
SCORE = TensorName("score.weight")


def tiny(**changes: object) -> ModelShape:
    model = ModelShape("llama", 4, 16, 24, 12, 2, 4, 40, tied=False)
    return replace(model, **changes)  # type: ignore[arg-type]


def rows(boxes: dict[TensorName, tuple[Box, ...]], name: str) -> list[tuple[int, int]]:
    return [(box.start[0], box.stop[0]) for box in boxes[TensorName(name)]]


def expected_holders(model: ModelShape, layout: Layout, convention: Convention, tensor: LogicalTensor) -> int:
    homes = 2 if tensor.home is Home.ENDS and layout.pp > 1 else 1
    if tensor.rule is Rule.REPLICATED:
        return homes * layout.tp
    if tensor.rule is Rule.KV_HEAD and convention is GENERATION:
        return homes * max(1, layout.tp // model.kv_heads)
    return homes


@given(st.data(), models())
def test_every_element_has_exactly_the_holders_its_rule_says(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    layout = data.draw(layouts(model, convention))
    ranks = unit_boxes(model, layout, convention)
    for name, tensor in model.tensors().items():
        count = np.zeros(tensor.shape, np.int64)
        for boxes in ranks:
            for box in boxes.get(name, ()):
                count[box.slices] += 1
        assert (count == expected_holders(model, layout, convention, tensor)).all(), name


@given(st.data(), models())
def test_each_rank_holds_what_laying_out_the_indices_gives_it(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    layout = data.draw(layouts(model, convention))
    tensors = {**model.tensors(), **optimizer_tensors(model, moments=("exp_avg",))}
    for rank, boxes in enumerate(unit_boxes(model, layout, convention, tensors=tensors)):
        for name, tensor in tensors.items():
            expected = holds(model, layout, rank, tensor, convention is GENERATION)
            assert (expected is None) == (name not in boxes), name
            if expected is not None:
                found = np.zeros(tensor.shape, np.int64)
                for box in boxes[name]:
                    found[box.slices] += 1
                assert (found == expected).all(), name


@given(st.data(), models())
def test_owned_boxes_are_disjoint_and_cover_every_tensor(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    held = unit_boxes(model, data.draw(layouts(model, convention)), convention)
    owned = owned_boxes(held)
    for name, tensor in model.tensors().items():
        region = [box for boxes in owned for box in boxes.get(name, ())]
        assert are_disjoint(region)
        assert covers(region, Box.whole(tensor.shape))
    for has, owns in zip(held, owned, strict=True):
        assert all(not difference(owns[name], has[name]) for name in has)


@given(st.data(), models())
def test_moments_are_where_their_parameter_is_and_counters_wherever_its_stage_is(
    data: st.DataObject, model: ModelShape
) -> None:
    layout = data.draw(layouts(model, TRAINING))
    for parameters, state in zip(
        unit_boxes(model, layout, TRAINING),
        unit_boxes(model, layout, TRAINING, tensors=optimizer_tensors(model)),
        strict=True,
    ):
        assert len(state) == 3 * len(parameters)
        for name, region in parameters.items():
            assert state[slot_name(name, "exp_avg")] == state[slot_name(name, "exp_avg_sq")] == region
            assert state[slot_name(name, "step")] == (Box((), ()),)


@given(st.data(), models())
def test_every_layer_is_on_exactly_one_pipeline_stage(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    layout = data.draw(layouts(model, convention))
    ids = [layer for stage in range(layout.pp) for layer in layers_of(model, layout, stage, convention)]
    assert Counter(ids) == Counter(range(model.layers))


def test_serving_and_training_may_put_the_same_layer_on_different_stages() -> None:
    model, layout = tiny(layers=30), Layout(pp=4)
    assert TRAINING.layer_counts(layout, 30) == (8, 8, 7, 7)
    assert GENERATION.layer_counts(layout, 30) == (7, 8, 8, 7)
    name = TensorName("model.layers.7.mlp.up_proj.weight")
    assert [name in boxes for boxes in unit_boxes(model, layout, TRAINING)] == [True, False, False, False]
    assert [name in boxes for boxes in unit_boxes(model, layout, GENERATION)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        (5, 2, (3, 2)),
        (7, 4, (2, 2, 2, 1)),
        (9, 4, (2, 2, 3, 2)),
        (10, 4, (2, 3, 3, 2)),
        (8, 3, (3, 3, 2)),
        (4, 4, (1,) * 4),
    ],
)
def test_the_serving_split_gives_what_is_left_to_the_stages_before_the_last(
    layers: int, pp: int, counts: tuple[int, ...]
) -> None:
    assert vllm_layers(Layout(pp=pp), layers) == counts


def test_an_explicit_split_wins_in_both_conventions() -> None:
    layout = Layout.parse("tp1.pp3(5+1+2).fs1")
    assert TRAINING.layer_counts(layout, 8) == GENERATION.layer_counts(layout, 8) == (5, 1, 2)


def test_more_serving_ranks_than_kv_heads_share_neighbouring_heads() -> None:
    ranks = unit_boxes(tiny(), Layout(tp=4), GENERATION)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert [rows(boxes, key) for boxes in ranks] == [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]
    query = "model.layers.0.self_attn.q_proj.weight"
    assert [rows(boxes, query) for boxes in ranks] == [[(12 * r, 12 * r + 12)] for r in range(4)]


def test_two_kv_heads_over_eight_serving_ranks_go_four_ranks_each() -> None:
    model = ModelShape("llama", 1, 8, 64, 64, 2, 128, 64, tied=False)
    ranks = unit_boxes(model, Layout(tp=8), GENERATION)
    value = "model.layers.0.self_attn.v_proj.weight"
    assert [rows(boxes, value)[0] for boxes in ranks] == [(0, 128)] * 4 + [(128, 256)] * 4
    query = "model.layers.0.self_attn.q_proj.weight"
    assert [rows(boxes, query)[0] for boxes in ranks] == [(1024 * r, 1024 * r + 1024) for r in range(8)]


def test_serving_pads_the_vocabulary_to_64_and_padding_is_in_no_box() -> None:
    model = tiny(vocabulary=1187, query_heads=8)  # padded to 1216: 304 rows per rank, the last has 29 rows less
    ranks = unit_boxes(model, Layout(tp=4), GENERATION)
    assert [rows(boxes, EMBEDDING)[0] for boxes in ranks] == [(0, 304), (304, 608), (608, 912), (912, 1187)]
    qwen = tiny(vocabulary=151936, query_heads=8)
    assert rows(shard_boxes(qwen, Layout(tp=4), 3, GENERATION), EMBEDDING) == [(37984 * 3, 37984 * 4)]


def test_a_serving_rank_whose_rows_are_all_padding_holds_none_and_is_valid() -> None:
    ranks = unit_boxes(tiny(vocabulary=10, query_heads=8), Layout(tp=4), GENERATION)
    assert [boxes[EMBEDDING] for boxes in ranks] == [(Box((0, 0), (10, 16)),), (), (), ()]


def test_training_cuts_an_odd_vocabulary_as_torch_chunk_does() -> None:
    ranks = unit_boxes(tiny(vocabulary=1187), Layout(tp=2), TRAINING)
    assert [rows(boxes, EMBEDDING)[0] for boxes in ranks] == [(0, 594), (594, 1187)]


def test_fs_cuts_rows_of_the_tp_local_tensor_and_later_ranks_may_hold_nothing() -> None:
    layout = Layout(tp=2, fs=3)
    norm, query = TensorName("model.norm.weight"), TensorName("model.layers.0.self_attn.q_proj.weight")
    output = TensorName("model.layers.0.self_attn.o_proj.weight")
    place = shard_boxes(tiny(), layout, layout.rank(Coordinate(0, 1, 1)), TRAINING)
    assert place[norm] == (Box((6,), (12,)),)
    assert place[query] == (Box((24 + 8, 0), (24 + 16, 16)),)
    assert place[output] == (Box((6, 24), (12, 48)),)
    many = shard_boxes(tiny(hidden=4, head_dim=1), Layout(fs=5), 4, TRAINING)
    assert many[norm] == ()


def test_the_vocabulary_rule_can_be_switched_to_replicated() -> None:
    convention = replace(TRAINING, vocabulary=whole)
    assert rows(shard_boxes(tiny(), Layout(tp=2), 1, convention), EMBEDDING) == [(0, 40)]
    assert rows(shard_boxes(tiny(), Layout(tp=2, fs=2), 3, convention), EMBEDDING) == [(20, 40)]


@pytest.mark.parametrize("convention", [TRAINING, GENERATION])
@pytest.mark.parametrize(("pp", "holders"), [(1, [0]), (2, [0, 1]), (3, [0, 2]), (4, [0, 3])])
def test_a_tied_embedding_is_on_the_first_and_last_stage_only(
    convention: Convention, pp: int, holders: list[int]
) -> None:
    ranks = unit_boxes(tiny(tied=True), Layout(pp=pp), convention)
    assert [rank for rank, boxes in enumerate(ranks) if EMBEDDING in boxes] == holders
    assert [rank for rank, boxes in enumerate(ranks) if "model.norm.weight" in boxes] == [pp - 1]
    assert all(len(boxes.get(EMBEDDING, ())) <= 1 for boxes in ranks)


def test_the_fullest_stage_has_the_tied_copy_and_the_final_norm() -> None:
    layout = Layout.parse("tp1.pp4(1+2+2+3).fs1")
    model = ModelShape("llama", 8, 16, 64, 4, 4, 4, 32, tied=True)
    layer = 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16
    held = [sum(elements(region) for region in boxes.values()) for boxes in unit_boxes(model, layout, TRAINING)]
    assert held == [layer + 512, 2 * layer, 2 * layer, 3 * layer + 16 + 512]


def test_a_checkpoint_holds_everything_once() -> None:
    model = tiny(tied=True)
    assert sum(elements(region) for region in whole_boxes(model.tensors()).values()) == model.parameters


@given(st.data(), models(Head.SCORE))
def test_the_row_of_a_score_head_is_on_the_first_fs_rank_of_the_last_stage_for_every_tp_rank(
    data: st.DataObject, model: ModelShape
) -> None:
    layout = data.draw(layouts(model, TRAINING))
    for rank, boxes in enumerate(unit_boxes(model, layout, TRAINING)):
        place = layout.coordinate(rank)
        row = (Box((0, 0), (1, model.hidden)),) if place.fs == 0 else ()
        assert boxes.get(SCORE) == (row if place.pp == layout.pp - 1 else None)
        assert (EMBEDDING in boxes) == (place.pp == 0)


def test_a_model_without_logits_does_not_generate() -> None:
    critic = tiny(head=Head.SCORE)
    with pytest.raises(UnsupportedByEngine, match="head is score"):
        shard_boxes(critic, Layout(), 0, GENERATION)


def test_inference_units_follow_the_training_convention() -> None:
    assert convention_of(Stage.INFERENCE) is convention_of(Stage.TRAINING) is TRAINING
    assert convention_of(Stage.GENERATION) is GENERATION


@pytest.mark.parametrize(
    ("convention", "model", "layout", "kind", "words"),
    [
        (TRAINING, SMOLLM2, "tp2.pp1.fs1", InvalidPlan, ["num_attention_heads is 9", "tp can be 1, 3", "tp2"]),
        (GENERATION, SMOLLM2, "tp9.pp1.fs1", InvalidPlan, ["intermediate_size is 1536", "tp can be 1, 3"]),
        (TRAINING, tiny(), "tp4.pp1.fs1", UnsupportedByEngine, ["num_key_value_heads is 2", "tp can be 1, 2"]),
        (GENERATION, tiny(), "tp3.pp1.fs1", InvalidPlan, ["num_key_value_heads is 2", "tp can be 1, 2, 4"]),
        (GENERATION, tiny(kv_heads=3), "tp3.pp1.fs1", InvalidPlan, ["padded to a multiple of 64 is 64"]),
        (GENERATION, tiny(), "tp1.pp1.fs2", UnsupportedByEngine, ["fs2", "fs can be 1"]),
        (TRAINING, tiny(), "tp2.pp1.fs1.ep2", InvalidPlan, ["no experts"]),
        (TRAINING, tiny(), "tp1.pp5.fs1", InvalidPlan, ["the model has 4"]),
        (GENERATION, tiny(), "tp1.pp5.fs1", InvalidPlan, ["the model has 4"]),
        (GENERATION, tiny(), "tp1.pp2(1+2).fs1", InvalidPlan, ["the model has 4"]),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_field_value_and_remedy(
    convention: Convention, model: ModelShape, layout: str, kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        shard_boxes(model, Layout.parse(layout), 0, convention)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert type(caught.value) is kind


def test_a_model_that_the_serving_engine_would_compute_wrongly_is_refused_there() -> None:
    biased = tiny(model_type="qwen3", qkv_bias=True, output_bias=True, qk_norm=True)
    wide = tiny(model_type="qwen2", head_dim=4)  # 12 heads × 4, hidden 16
    for model, word in ((biased, "o_proj"), (wide, "head_dim is 4")):
        with pytest.raises(UnsupportedByEngine, match=word):
            shard_boxes(model, Layout(), 0, GENERATION)
        assert shard_boxes(model, Layout(), 0, TRAINING)
