"""Counted operations against torch's own counter, and against each other over layouts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import Head, Stage
from nereus_common.core.layout import Layout
from nereus_common.planning.counts import rank_shape
from nereus_common.planning.tokens import Tokens
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

DENSE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 130,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {**DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**DENSE, "model_type": "qwen2"},
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        **DENSE,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 2,
    },
}
ROWS = 11
ALL_PAIRS = Tokens(ROWS, ROWS * ROWS, ROWS)
"""Eager attention multiplies what the mask hides as well."""
ONE = Layout()


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(MODELS[name])


def counted(name: str, *, backward: bool) -> int:
    """By torch, of one sequence of ROWS tokens."""
    given = dict(MODELS[name])
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(ROWS)[None], use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", list(MODELS))
def test_a_forward_pass_has_the_operations_that_torch_counts(name: str) -> None:
    assert rank_shape(shape(name), Stage.TRAINING, ONE, 0).forward(ALL_PAIRS).total == counted(name, backward=False)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_backward_pass_has_twice_as_many(name: str) -> None:
    found = rank_shape(shape(name), Stage.TRAINING, ONE, 0)
    both = found.forward(ALL_PAIRS) + found.backward(ALL_PAIRS, recompute=False)
    assert both.total == counted(name, backward=True)
    again = found.backward(ALL_PAIRS, recompute=True).total - found.backward(ALL_PAIRS, recompute=False).total
    assert again == found.forward(replace(ALL_PAIRS, predicted=0)).total


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("layout", ["tp2.pp1.fs1", "tp1.pp3.fs1", "tp1.pp2(1+2).fs2", "tp2.pp2.fs1"])
def test_the_ranks_of_an_even_layout_do_the_work_of_one_between_them(name: str, layout: str) -> None:
    """But for a router, which every rank has whole."""
    model, cut = shape(name), Layout.parse(layout)
    parts = [rank_shape(model, Stage.TRAINING, cut, stage) for stage in range(cut.pp)]
    whole = rank_shape(model, Stage.TRAINING, ONE, 0)
    sparse = len(model.experts.layers) * model.experts.count if model.experts else 0
    router = (cut.tp - 1) * sparse * model.hidden
    assert cut.tp * sum(part.body for part in parts) == pytest.approx(whole.body + router)
    assert cut.tp * sum(part.head for part in parts) == pytest.approx(whole.head)
    assert cut.tp * sum(part.pair for part in parts) == pytest.approx(whole.pair)


def test_a_tied_head_is_computed_on_the_last_pipeline_stage_only() -> None:
    parts = [rank_shape(shape("llama-tied"), Stage.TRAINING, Layout(pp=3), stage).head for stage in range(3)]
    assert parts == [0, 0, 48 * 130]


def test_shared_key_and_value_heads_are_computed_by_each_rank_that_has_them() -> None:
    model = replace(shape("llama"), ffn=84, vocabulary=384)
    found = rank_shape(model, Stage.GENERATION, Layout(tp=6), 0)
    one_head = 48 * 8
    assert found.body == 3 * (4 * one_head + 3 * 48 * 14)


def test_the_busiest_rank_counts_where_a_width_does_not_divide() -> None:
    found = rank_shape(replace(shape("llama"), kv_heads=6, ffn=84), Stage.TRAINING, Layout(tp=3), 0)
    assert found.head == 48 * math.ceil(130 / 3)


def test_a_value_head_is_one_row() -> None:
    model = ModelShape.from_config(MODELS["llama"], Head.SCORE)
    assert rank_shape(model, Stage.TRAINING, ONE, 0).head == 48


lengths = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5)


@given(lengths)
def test_tokens_add_up_over_sequences(sequences: list[tuple[int, int]]) -> None:
    tokens = Tokens.of(sequences)
    pairs = sum(1 for p, r in sequences for query in range(p + r) for _ in range(query + 1))
    responses = sum(response for _, response in sequences)
    assert (tokens.rows, tokens.pairs, tokens.predicted) == (sum(map(sum, sequences)), pairs, responses)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_tokens_that_are_no_number_are_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        Tokens(1.0, wrong, 1.0)
    assert refused.value.details["field"] == "pairs"


REFERENCE = os.environ.get("NEREUS_REFERENCE_DATA")


@pytest.mark.skipif(REFERENCE is None, reason="NEREUS_REFERENCE_DATA is not set: published models are not counted")
@pytest.mark.parametrize(
    ("name", "active"), [("Llama-3.1-8B", 7.5e9), ("Mixtral-8x7B", 12.75e9), ("Qwen3-30B-A3B", 3.03e9)]
)
def test_a_row_goes_through_every_active_parameter_once(name: str, active: float) -> None:
    config = json.loads((Path(str(REFERENCE)) / "models" / f"{name}.json").read_text())
    found = rank_shape(ModelShape.from_config(config), Stage.TRAINING, ONE, 0)
    assert found.body + found.head == pytest.approx(active, rel=0.02)
