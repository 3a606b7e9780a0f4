from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nereus_common.core.errors import InvalidInput, UnsupportedByEngine
from nereus_common.core.ids import Head
from nereus_common.state.architecture import FAMILIES, Home, ModelShape, Rule

pytestmark = pytest.mark.fast

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def published() -> list[Path]:
    root = os.environ.get("NEREUS_REFERENCE_DATA")
    if root is None:
        return []
    return [path for path in sorted(Path(root, "models").glob("*.json")) if path.name != "index.json"]


@pytest.mark.parametrize("path", published(), ids=lambda path: path.stem)
def test_the_shapes_of_a_published_model_add_up_to_its_published_size(path: Path) -> None:
    config = json.loads(path.read_text())
    if config["model_type"] not in FAMILIES:
        with pytest.raises(UnsupportedByEngine, match=config["model_type"]):
            ModelShape.from_config(config)
        return
    assert ModelShape.from_config(config).parameters == config["_nereus"]["param_count_from_shapes"]


@pytest.mark.skipif(not published(), reason="NEREUS_REFERENCE_DATA is not set: published model shapes are not compared")
def test_every_dense_family_with_rules_is_among_the_published_models() -> None:
    seen = {json.loads(path.read_text())["model_type"] for path in published()}
    assert seen >= {"llama", "qwen2", "qwen3"}


def test_a_tied_head_is_no_tensor_and_its_embedding_lives_at_both_ends() -> None:
    tied = ModelShape.from_config(CONFIG | {"tie_word_embeddings": True}).tensors()
    untied = ModelShape.from_config(CONFIG).tensors()
    assert "lm_head.weight" not in tied
    assert tied["model.embed_tokens.weight"].home is Home.ENDS  # type: ignore[index]
    assert untied["model.embed_tokens.weight"].home is Home.FIRST  # type: ignore[index]
    assert untied["lm_head.weight"].home is Home.LAST  # type: ignore[index]


@pytest.mark.parametrize("tied", [True, False])
def test_a_score_head_is_one_replicated_row_and_ties_nothing(tied: bool) -> None:
    tensors = ModelShape.from_config(CONFIG | {"tie_word_embeddings": tied}, Head.SCORE).tensors()
    score = tensors["score.weight"]  # type: ignore[index]
    assert (score.shape, score.rule, score.home) == ((1, 12), Rule.REPLICATED, Home.LAST)
    assert tensors["model.embed_tokens.weight"].home is Home.FIRST  # type: ignore[index]
    assert "lm_head.weight" not in tensors
    assert list(tensors)[-1] == "score.weight"


CLASSIFIER = CONFIG | {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize("changes", [{"id2label": {"0": "LABEL_0"}}, {"num_labels": 1}])
def test_a_classifier_with_one_label_has_a_score_head(changes: dict[str, Any]) -> None:
    assert "score.weight" in ModelShape.from_config(CLASSIFIER | changes, Head.SCORE).tensors()


@pytest.mark.parametrize(
    ("changes", "field", "labels"),
    [
        ({}, "id2label", 2),
        ({"id2label": {"0": "bad", "1": "fair", "2": "good"}}, "id2label", 3),
        ({"num_labels": 5}, "num_labels", 5),
    ],
)
def test_a_classifier_with_more_labels_is_refused_by_field(changes: dict[str, Any], field: str, labels: int) -> None:
    with pytest.raises(UnsupportedByEngine, match=f"config.{field} makes {labels} labels"):
        ModelShape.from_config(CLASSIFIER | changes, Head.SCORE)


def test_a_language_model_that_becomes_a_critic_may_have_any_labels() -> None:
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "id2label": {"0": "a", "1": "b"}}
    assert ModelShape.from_config(config, Head.SCORE).head is Head.SCORE


def test_an_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    model = ModelShape.from_config(CONFIG | {"head_dim": 5})
    shapes = {name: tensor.shape for name, tensor in model.tensors().items()}
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (30, 12)  # type: ignore[index]
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (12, 30)  # type: ignore[index]
    assert ModelShape.from_config(CONFIG | {"model_type": "qwen3"}).head_dim == 128
    assert ModelShape.from_config(CONFIG | {"head_dim": None}).head_dim == 2


def test_a_row_parallel_bias_is_replicated_and_a_column_parallel_bias_is_cut() -> None:
    tensors = ModelShape.from_config(CONFIG | {"attention_bias": True, "mlp_bias": True}).tensors()
    rules = {name.removeprefix("model.layers.0."): tensor.rule for name, tensor in tensors.items()}
    assert rules["self_attn.q_proj.bias"] is Rule.COLUMN
    assert rules["self_attn.v_proj.bias"] is Rule.KV_HEAD
    assert rules["mlp.up_proj.bias"] is Rule.COLUMN
    assert rules["self_attn.o_proj.bias"] is Rule.REPLICATED
    assert rules["mlp.down_proj.bias"] is Rule.REPLICATED


def test_qwen2_has_qkv_biases_whatever_its_config_says() -> None:
    tensors = ModelShape.from_config(CONFIG | {"model_type": "qwen2", "attention_bias": False}).tensors()
    assert {name for name in tensors if name.endswith(".bias")} == {
        f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in (0, 1) for part in "qkv"
    }


def test_missing_kv_heads_mean_one_per_query_head() -> None:
    assert ModelShape.from_config({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}).kv_heads == 6


@pytest.mark.parametrize("field", sorted(set(CONFIG) - {"model_type", "num_key_value_heads"}))
@pytest.mark.parametrize("value", [None, 0, "8", True])
def test_a_wrong_number_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=f"config.{field}") as caught:
        ModelShape.from_config(CONFIG | {field: value})
    assert caught.value.details["field"] == f"config.{field}"


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    with pytest.raises(InvalidInput, match="num_key_value_heads is 4"):
        ModelShape.from_config(CONFIG | {"num_key_value_heads": 4})


def test_what_has_no_rules_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedByEngine, match=r"'mixtral'.*llama, mistral, qwen2, qwen3"):
        ModelShape.from_config(CONFIG | {"model_type": "mixtral"})
    with pytest.raises(UnsupportedByEngine, match="None"):
        ModelShape.from_config({})
    with pytest.raises(UnsupportedByEngine, match="quantization_config"):
        ModelShape.from_config(CONFIG | {"quantization_config": {"bits": 4}})
