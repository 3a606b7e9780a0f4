"""What a `model_type` fixes about a decoder's tensors, beside the numbers in its config: one row per family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's sparse layers are described in config.json, and what their tensors are called.

    `count`: config fields, the first that is there gives the number of experts; `ffn` and `shared_ffn`: those with the
    width of one expert and of the shared one, None where the family has none. `per_token`: to how many experts a token
    goes where the config leaves it out. `projections`: gate, up and down of an expert. `dense_layers`: whether the
    config can make layers dense (`decoder_sparse_step`, `mlp_only_layers`).
    """

    block: str
    projections: tuple[str, str, str]
    count: tuple[str, ...]
    ffn: str
    per_token: int
    shared_ffn: str | None = None
    dense_layers: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What a `model_type` fixes. A str names the config field that decides; `head_dim` is the config class's default,
    None meaning hidden_size / num_attention_heads; `tied` holds where config.json leaves tie_word_embeddings out.
    `norms`: the first before attention, the others behind it.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    tied: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    experts: ExpertNames | None = None


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_QWEN_EXPERTS = ExpertNames(
    "mlp", GATE_UP_DOWN, ("num_experts", "num_local_experts"), "moe_intermediate_size", 8, dense_layers=True
)

FAMILIES: Mapping[str, Family] = {
    "gemma2": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        head_dim=256,
        tied=True,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    ),
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "mixtral": Family(
        experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), ("num_local_experts",), "intermediate_size", 2)
    ),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", experts=replace(_QWEN_EXPERTS, per_token=4, shared_ffn="shared_expert_intermediate_size")
    ),
    "qwen3": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, head_dim=128),
    "qwen3_moe": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, experts=_QWEN_EXPERTS),
}
