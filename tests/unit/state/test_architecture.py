from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nereus_common.core.errors import InvalidInput, UnsupportedByEngine
from nereus_common.core.ids import Head
from nereus_common.state.architecture import Home, ModelShape, Rule
from nereus_common.state.families import FAMILIES

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
def test_the_families_that_matter_are_among_the_published_models() -> None:
    seen = {json.loads(path.read_text())["model_type"] for path in published()}
    assert seen >= {"gemma2", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"}


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
    with pytest.raises(UnsupportedByEngine, match=r"'deepseek_v2'.*llama, mistral, mixtral, qwen2"):
        ModelShape.from_config(CONFIG | {"model_type": "deepseek_v2"})
    with pytest.raises(UnsupportedByEngine, match="None"):
        ModelShape.from_config({})
    with pytest.raises(UnsupportedByEngine, match="quantization_config"):
        ModelShape.from_config(CONFIG | {"quantization_config": {"bits": 4}})


SPARSE = CONFIG | {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 8}


def names_of(config: dict[str, Any], layer: int) -> set[str]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix) for name in ModelShape.from_config(config).tensors() if name.startswith(prefix)}


def test_every_expert_has_its_own_matrices_and_the_router_one_row_per_expert() -> None:
    tensors = ModelShape.from_config(SPARSE).tensors()
    down = tensors["model.layers.1.mlp.experts.2.down_proj.weight"]  # type: ignore[index]
    assert (down.shape, down.rule, down.expert, down.layer) == ((12, 8), Rule.ROW, 2, 1)
    router = tensors["model.layers.0.mlp.gate.weight"]  # type: ignore[index]
    assert (router.shape, router.rule, router.expert) == ((3, 12), Rule.REPLICATED, None)
    assert "mlp.gate_proj.weight" not in names_of(SPARSE, 0)


def test_mixtral_names_its_experts_its_own_way_and_takes_their_width_from_intermediate_size() -> None:
    mixtral = ModelShape.from_config(CONFIG | {"model_type": "mixtral", "num_local_experts": 2})
    shapes = {name: tensor.shape for name, tensor in mixtral.tensors().items()}
    assert shapes["model.layers.0.block_sparse_moe.gate.weight"] == (2, 12)  # type: ignore[index]
    assert shapes["model.layers.1.block_sparse_moe.experts.1.w2.weight"] == (12, 20)  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [({}, {0, 1, 2, 3}), ({"decoder_sparse_step": 2}, {1, 3}), ({"mlp_only_layers": [0, 3]}, {1, 2})],
)
def test_the_config_decides_which_layers_are_sparse_and_the_others_are_dense(
    changes: dict[str, Any], sparse: set[int]
) -> None:
    config = SPARSE | {"num_hidden_layers": 4} | changes
    for layer in range(4):
        assert ("mlp.gate.weight" in names_of(config, layer)) == (layer in sparse)
        assert ("mlp.up_proj.weight" in names_of(config, layer)) == (layer not in sparse)


def test_a_shared_expert_is_a_dense_block_beside_the_routed_ones() -> None:
    shared = SPARSE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 10, "qkv_bias": True}
    tensors = ModelShape.from_config(shared).tensors()
    up = tensors["model.layers.0.mlp.shared_expert.up_proj.weight"]  # type: ignore[index]
    assert (up.shape, up.rule, up.expert) == ((10, 12), Rule.COLUMN, None)
    assert tensors["model.layers.0.mlp.shared_expert_gate.weight"].rule is Rule.REPLICATED  # type: ignore[index]
    with pytest.raises(UnsupportedByEngine, match="n_shared_experts is 2"):
        ModelShape.from_config(SPARSE | {"n_shared_experts": 2})


def test_gemma_2_has_four_norms_a_layer_and_is_tied_unless_its_config_says_otherwise() -> None:
    gemma = CONFIG | {"model_type": "gemma2"}
    assert len([name for name in names_of(gemma, 0) if name.endswith("layernorm.weight")]) == 4
    assert ModelShape.from_config(gemma).tied
    assert ModelShape.from_config(gemma).head_dim == 256
    assert not ModelShape.from_config(gemma | {"tie_word_embeddings": False}).tied


@pytest.mark.parametrize("field", ["num_experts", "moe_intermediate_size", "decoder_sparse_step"])
def test_a_wrong_number_of_a_sparse_model_is_refused_by_the_name_of_its_field(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"config.{field}"):
        ModelShape.from_config(SPARSE | {field: 0})
