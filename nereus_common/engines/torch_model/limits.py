"""What the torch engines can run. Pure: asked before any process starts, so it imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput, NotFound, UnsupportedByEngine
from nereus_common.core.ids import Head
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.state.architecture import CLASSIFIER, check_labels, is_classifier

CAUSAL = "ForCausalLM"
ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Decoders, with a vocabulary's head (`LlamaForCausalLM`) or a score head (`LlamaForSequenceClassification`)."""
DTYPES = ("float32", "bfloat16")


def read_config(model_path: str) -> dict[str, Any]:
    """config.json of a Hugging Face folder; NotFound or InvalidInput name the file."""
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as missing:
        raise NotFound(f"{path} does not exist", remedy="give a Hugging Face model folder", field="model") from missing
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"{path} is not JSON: {wrong}", field="model") from wrong
    if not isinstance(config, dict):
        raise InvalidInput(f"{path} holds no object", field="model")
    return config


def check_plan(config: Mapping[str, Any], stage: StagePlan, head: Head = Head.LM) -> None:
    """Raise UnsupportedByEngine, naming field and remedy, when no torch engine can run `stage` for the model with
    `head` on it."""
    _check_model(config)
    _check_head(config, head)
    _check_layout(config, stage.layout)
    if stage.generation is not None:
        raise _refusal("generation", "the torch engines do not generate", "leave the generation limits out")
    if stage.dtypes.master != "float32":
        raise _refusal("dtypes.master", f"master weights in {stage.dtypes.master}", "use float32")
    if stage.dtypes.compute not in DTYPES:
        raise _refusal("dtypes.compute", f"compute in {stage.dtypes.compute}", f"use one of {', '.join(DTYPES)}")
    if stage.accumulation is not None:
        raise _refusal(
            "accumulation", "a fixed number of microbatches", "leave it out: the batch and microbatch_tokens decide"
        )


def _check_model(config: Mapping[str, Any]) -> None:
    name = str((config.get("architectures") or ["none"])[0])
    decoder = name.removesuffix(CAUSAL).removesuffix(CLASSIFIER)
    if decoder not in ARCHITECTURES or decoder == name:
        known = ", ".join(f"{one}{CAUSAL}, {one}{CLASSIFIER}" for one in ARCHITECTURES)
        raise _refusal("architectures", f"architecture {name}", f"known: {known}")
    sliding = config.get("use_sliding_window", decoder == "Mistral") and config.get("sliding_window")
    if sliding or "sliding_attention" in (config.get("layer_types") or ()):
        raise _refusal("sliding_window", "sliding-window attention", "use a model with full attention")
    if config.get("attention_dropout"):
        raise _refusal("attention_dropout", "dropout", "set attention_dropout to 0")


def _check_head(config: Mapping[str, Any], head: Head) -> None:
    """A score head goes on any decoder; log-probs need the vocabulary's, which a classifier does not have."""
    if head is Head.SCORE:
        check_labels(config)
    elif is_classifier(config):
        found = config["architectures"][0]
        raise _refusal("architectures", f"log-probs of a {found}", "give a causal language model")


def _check_layout(config: Mapping[str, Any], layout: Layout) -> None:
    if layout.ep > 1:
        raise _refusal("layout.ep", f"{layout}: the model has no experts", "set ep to 1")
    heads = config["num_attention_heads"]
    for field, size in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", config.get("num_key_value_heads") or heads),
        ("intermediate_size", config["intermediate_size"]),
    ):
        if size % layout.tp:
            raise _refusal("layout.tp", f"tp{layout.tp} does not divide {field} {size}", f"choose a divisor of {size}")
    if config["vocab_size"] <= (layout.tp - 1) * -(-config["vocab_size"] // layout.tp):
        raise _refusal("layout.tp", f"tp{layout.tp} leaves a rank without vocabulary rows", "choose a smaller tp")
    layout.layer_counts(config["num_hidden_layers"])


def _refusal(field: str, what: str, remedy: str) -> UnsupportedByEngine:
    return UnsupportedByEngine(f"{field}: the torch engines cannot run this: {what}", remedy=remedy, field=field)
