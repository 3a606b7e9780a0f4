"""Which logical tensors a model has, and by which rule each may be cut: from its Hugging Face config alone.

No model is built and no weight is read, so models that fit on no machine here can be planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Self

from nereus_common.core.errors import InvalidInput, UnsupportedByEngine
from nereus_common.core.ids import Head, TensorName
from nereus_common.state.families import FAMILIES, GATE_UP_DOWN, ExpertNames, Family

EMBEDDING = TensorName("model.embed_tokens.weight")
FINAL_NORM = TensorName("model.norm.weight")
HEAD = TensorName("lm_head.weight")
SCORE = TensorName("score.weight")
PER_TOKEN = "num_experts_per_tok"
CLASSIFIER = "ForSequenceClassification"
"""How the architecture of a checkpoint that brings a score head ends."""


class Rule(StrEnum):
    """How tensor parallelism treats a tensor; what it means in numbers is the convention's table."""

    COLUMN = "column"
    """Outputs, dimension 0, are divided: q, gate, up."""
    KV_HEAD = "kv_head"
    """Outputs are divided by KV head; more ranks than heads share a head, or are refused."""
    ROW = "row"
    """Inputs, dimension 1, are divided: o, down."""
    VOCABULARY = "vocabulary"
    """Rows of the vocabulary, dimension 0: embedding and head."""
    REPLICATED = "replicated"
    """Every rank has all of it: norms, biases of row-parallel layers, counters."""


class Home(StrEnum):
    """On which pipeline stages a tensor lives."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"
    ENDS = "ends"
    """The first and the last: a tied embedding, one logical tensor with two holders (one when pp is 1)."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor as the checkpoint names it. `units`: of how many indivisible parts (heads, columns, rows) the
    dimension that tp cuts is made. `layer` is set when `home` is LAYER, `expert` for a matrix of one routed expert."""

    name: TensorName
    shape: tuple[int, ...]
    rule: Rule
    home: Home
    units: int = 1
    layer: int | None = None
    expert: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a model with sparse layers: how many experts each of `layers` has, and their width. `shared_ffn`: of the
    expert that sees every token, 0 where there is none. `per_token`: how many of the others a token sees."""

    count: int
    ffn: int
    layers: tuple[int, ...]
    shared_ffn: int = 0
    per_token: int = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All numbers of a decoder that decide its tensors; field names in errors are those of config.json.

    With head SCORE one row, `score.weight` [1, hidden], stands where `lm_head.weight` would; nothing is tied to it.
    """

    model_type: str
    layers: int
    hidden: int
    ffn: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head: Head = Head.LM
    experts: Experts | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head: Head = Head.LM) -> Self:
        """Read a Hugging Face `config.json`, of a causal language model or of a sequence classifier, for `head`.

        UnsupportedByEngine: a model_type, a quantisation or a number of labels without rules. InvalidInput: a field
        missing or wrong.
        """
        family = _family(config)
        if head is Head.SCORE:
            check_labels(config)
        hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        optional = {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None}
        kv_heads = _positive({"num_key_value_heads": heads, **optional}, "num_key_value_heads")
        if heads % kv_heads:
            raise InvalidInput(
                f"config.num_key_value_heads is {kv_heads}, which does not divide num_attention_heads {heads}",
                remedy="check config.json",
                field="config.num_key_value_heads",
            )
        return cls(
            model_type=config["model_type"],
            layers=_positive(config, "num_hidden_layers"),
            hidden=hidden,
            ffn=_positive(config, "intermediate_size"),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=_positive({"head_dim": family.head_dim or hidden // heads, **optional}, "head_dim"),
            vocabulary=_positive(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)) and head is Head.LM,
            qkv_bias=_flag(config, family.qkv_bias),
            output_bias=_flag(config, family.output_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            qk_norm=family.qk_norm,
            head=head,
            experts=None if family.experts is None else _experts(config, family.experts),
        )

    def tensors(self) -> Mapping[TensorName, LogicalTensor]:
        """Every parameter, in model order. A tied head is not among them: it is the embedding."""
        return _tensors(self)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a feed-forward block of width `ffn`."""
        return self.experts is None or len(self.experts.layers) < self.layers

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors().values())


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the config's checkpoint is a `...ForSequenceClassification`: it has a score head and no vocabulary's."""
    return str((config.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def check_labels(config: Mapping[str, Any]) -> None:
    """UnsupportedByEngine when a sequence classifier gives another number of scores than one.

    Hugging Face writes two labels, its default, by leaving both fields out.
    """
    if not is_classifier(config):
        return
    field = "num_labels" if config.get("num_labels") is not None else "id2label"
    labels = config["num_labels"] if field == "num_labels" else len(config.get("id2label") or range(2))
    if labels != 1:
        raise UnsupportedByEngine(
            f"config.{field} makes {labels} labels: a score head has one row",
            remedy="give a classifier that was trained with num_labels=1",
            field=f"config.{field}",
        )


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedByEngine(
            f"config.model_type {model_type!r} has no layout rules",
            remedy=f"there are rules for {', '.join(sorted(FAMILIES))}",
            field="config.model_type",
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedByEngine(
            "config.quantization_config is set: quantised checkpoints have other tensors",
            remedy="save the model dequantised and without quantization_config",
            field="config.quantization_config",
        )
    return FAMILIES[str(model_type)]


def _experts(config: Mapping[str, Any], names: ExpertNames) -> Experts:
    if config.get("n_shared_experts") and names.shared_ffn is None:
        raise UnsupportedByEngine(
            f"config.n_shared_experts is {config['n_shared_experts']}: {config['model_type']} has no shared experts",
            remedy="check config.json",
            field="config.n_shared_experts",
        )
    layers = range(_positive(config, "num_hidden_layers"))
    step = _positive({"decoder_sparse_step": 1, **config}, "decoder_sparse_step") if names.dense_layers else 1
    dense = set(config.get("mlp_only_layers") or ()) if names.dense_layers else set()
    return Experts(
        count=_positive(config, next((field for field in names.count if field in config), names.count[0])),
        ffn=_positive(config, names.ffn),
        layers=tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense),
        shared_ffn=0 if names.shared_ffn is None else _positive(config, names.shared_ffn),
        per_token=_positive({PER_TOKEN: names.per_token, **config}, PER_TOKEN),
    )


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = f"is {value!r}" if field in config else "is missing"
        raise InvalidInput(f"config.{field} {found}", remedy="it must be a positive integer", field=f"config.{field}")
    return value


def _flag(config: Mapping[str, Any], source: bool | str) -> bool:
    return bool(config.get(source, False)) if isinstance(source, str) else source


@lru_cache(maxsize=64)
def _tensors(model: ModelShape) -> Mapping[TensorName, LogicalTensor]:
    vocabulary = (model.vocabulary, model.hidden)
    home = Home.ENDS if model.tied else Home.FIRST
    found = [LogicalTensor(EMBEDDING, vocabulary, Rule.VOCABULARY, home, model.vocabulary)]
    for layer in range(model.layers):
        found += _layer_tensors(model, layer)
    found.append(LogicalTensor(FINAL_NORM, (model.hidden,), Rule.REPLICATED, Home.LAST))
    if model.head is Head.SCORE:
        found.append(LogicalTensor(SCORE, (1, model.hidden), Rule.REPLICATED, Home.LAST))
    elif not model.tied:
        found.append(LogicalTensor(HEAD, vocabulary, Rule.VOCABULARY, Home.LAST, model.vocabulary))
    return MappingProxyType({tensor.name: tensor for tensor in found})


def _layer_tensors(model: ModelShape, layer: int) -> Iterator[LogicalTensor]:
    family = FAMILIES[model.model_type]
    for name, shape, rule, units, expert in _within_layer(model, family, layer):
        full = TensorName(f"model.layers.{layer}.{name}")
        yield LogicalTensor(full, shape, rule, Home.LAYER, units, layer, expert)


_Row = tuple[str, tuple[int, ...], Rule, int, int | None]
"""(name within its layer, shape, rule, units, expert)"""


def _within_layer(model: ModelShape, family: Family, layer: int) -> Iterator[_Row]:
    queries, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    before, *behind = (_whole(f"{norm}.weight", model.hidden) for norm in family.norms)
    yield before
    for name, outputs, inputs, rule, units, bias in (
        ("q_proj", queries, model.hidden, Rule.COLUMN, model.query_heads, model.qkv_bias),
        ("k_proj", keys, model.hidden, Rule.KV_HEAD, model.kv_heads, model.qkv_bias),
        ("v_proj", keys, model.hidden, Rule.KV_HEAD, model.kv_heads, model.qkv_bias),
        ("o_proj", model.hidden, queries, Rule.ROW, model.query_heads, model.output_bias),
    ):
        yield from _linear(f"self_attn.{name}", (outputs, inputs), rule, units, bias)
    if model.experts is not None and layer in model.experts.layers and family.experts is not None:
        yield from _sparse(model, model.experts, family.experts)
    else:
        yield from _feed_forward("mlp", GATE_UP_DOWN, model.hidden, model.ffn, model.mlp_bias)
    if model.qk_norm:
        yield _whole("self_attn.q_norm.weight", model.head_dim)
        yield _whole("self_attn.k_norm.weight", model.head_dim)
    yield from behind


def _sparse(model: ModelShape, experts: Experts, names: ExpertNames) -> Iterator[_Row]:
    """Router and shared expert are on every rank, whatever ep: classified by their names, not by a framework's flag."""
    yield _whole(f"{names.block}.gate.weight", experts.count, model.hidden)
    for expert in range(experts.count):
        block = f"{names.block}.experts.{expert}"
        yield from _feed_forward(block, names.projections, model.hidden, experts.ffn, expert=expert)
    if experts.shared_ffn:
        yield from _feed_forward(f"{names.block}.shared_expert", GATE_UP_DOWN, model.hidden, experts.shared_ffn)
        yield _whole(f"{names.block}.shared_expert_gate.weight", 1, model.hidden)


def _feed_forward(
    block: str,
    projections: tuple[str, str, str],
    hidden: int,
    ffn: int,
    bias: bool = False,
    expert: int | None = None,
) -> Iterator[_Row]:
    gate, up, down = projections
    for name, shape, rule in (
        (gate, (ffn, hidden), Rule.COLUMN),
        (up, (ffn, hidden), Rule.COLUMN),
        (down, (hidden, ffn), Rule.ROW),
    ):
        yield from _linear(f"{block}.{name}", shape, rule, ffn, bias, expert)


def _linear(
    name: str, shape: tuple[int, int], rule: Rule, units: int, bias: bool, expert: int | None = None
) -> Iterator[_Row]:
    yield f"{name}.weight", shape, rule, units, expert
    if bias:  # a row-parallel layer's bias is added once, after the sum over ranks: no rank has only a part of it
        row = rule is Rule.ROW
        yield f"{name}.bias", shape[:1], Rule.REPLICATED if row else rule, 1 if row else units, expert


def _whole(name: str, *shape: int) -> _Row:
    return name, shape, Rule.REPLICATED, 1, None
