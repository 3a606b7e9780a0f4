"""Which plans an engine can run. Pure: what it refuses it refuses by field, before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nereus_common.core.errors import UnsupportedByEngine
from nereus_common.core.plan import Residency, StagePlan

DTYPES = ("bfloat16", "float16", "float32")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPU attention is compiled for; other sizes fail in the first forward pass."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_plan(engine: str, config: Mapping[str, Any], plan: StagePlan) -> None:
    """Raise UnsupportedByEngine unless `engine` can run `plan` with the model of this Hugging Face `config`."""
    check = _CHECKS.get(engine)
    if check is None:
        raise _refuse("engine", f"generation engine {engine!r} does not exist", f"one of {', '.join(_CHECKS)}")
    check(config, plan)


def head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check_common(engine: str, config: Mapping[str, Any], plan: StagePlan) -> None:
    layout = plan.layout
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in ARCHITECTURES:
        raise _refuse(
            "model.architecture",
            f"the weights of {architectures[0]} cannot be taken over by the {engine} engine",
            f"it knows {', '.join(ARCHITECTURES)}",
        )
    if plan.generation is None:
        raise _refuse("generation", f"{engine} is given a plan without generation limits", "set `generation`")
    if layout.pp > 1:
        raise _refuse("layout.pp", f"{engine} cannot run {layout}: no pipeline stages", "pp1; use tp for a large model")
    if layout.fs > 1:
        raise _refuse(
            "layout.fs", f"{engine} cannot run {layout}: weights are not sharded over fs", "fs1, more replicas"
        )
    if layout.ep > 1:
        raise _refuse("layout.ep", f"{engine} cannot run {layout}: no expert parallelism", "ep1")
    if plan.dtypes.compute not in DTYPES:
        raise _refuse("dtypes.compute", f"{engine} cannot compute in {plan.dtypes.compute}", f"one of {DTYPES}")
    if plan.dtypes.kv != plan.dtypes.compute:
        raise _refuse(
            "dtypes.kv",
            f"{engine} keeps its KV cache in the compute dtype {plan.dtypes.compute}, not in {plan.dtypes.kv}",
            "name the same dtype for both",
        )
    longest = config.get("max_position_embeddings", plan.generation.max_length)
    if plan.generation.max_length > longest:
        raise _refuse(
            "generation.max_length",
            f"max_length {plan.generation.max_length} exceeds the {longest} positions of the model",
            "lower it",
        )


def _check_vllm(config: Mapping[str, Any], plan: StagePlan) -> None:
    _check_common("vllm", config, plan)
    _check_tensor_parallel(config, plan.layout.tp)
    if all(device.slot.startswith("cpu") for device in plan.devices):
        _check_vllm_on_cpu(config, plan)


def _check_tensor_parallel(config: Mapping[str, Any], tp: int) -> None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    for field, count in (("num_attention_heads", heads), ("intermediate_size", config["intermediate_size"])):
        if count % tp:
            raise _refuse("layout.tp", f"tp{tp} does not divide {field} = {count}", f"a divisor of {count}")
    if kv_heads % tp and tp % kv_heads:
        raise _refuse(
            "layout.tp",
            f"tp{tp} neither divides nor is a multiple of num_key_value_heads = {kv_heads}",
            f"a divisor or multiple of {kv_heads}",
        )
    padded = -(-config["vocab_size"] // 64) * 64
    if padded % tp:
        raise _refuse("layout.tp", f"tp{tp} does not divide the padded vocabulary of {padded}", "another tp")


def _check_vllm_on_cpu(config: Mapping[str, Any], plan: StagePlan) -> None:
    size = head_size(config)
    if size not in CPU_HEAD_SIZES:
        raise _refuse(
            "model.head_dim", f"vllm has no CPU attention for heads of {size}", f"sizes {CPU_HEAD_SIZES}, or a GPU"
        )
    if plan.idle is not Residency.DEVICE:
        raise _refuse("idle", f"vllm on CPU cannot move weights to {plan.idle} when idle", "residency `device`")


def _check_transformers(config: Mapping[str, Any], plan: StagePlan) -> None:
    _check_common("transformers", config, plan)
    if plan.layout.tp > 1:
        raise _refuse("layout.tp", "the transformers engine is a single process", "tp1, or the vllm engine")
    if plan.idle is not Residency.DEVICE:
        raise _refuse("idle", f"the transformers engine cannot move weights to {plan.idle}", "residency `device`")


def _refuse(field: str, message: str, remedy: str) -> UnsupportedByEngine:
    return UnsupportedByEngine(message, remedy=remedy, field=field)


_CHECKS: dict[str, Callable[[Mapping[str, Any], StagePlan], None]] = {
    "vllm": _check_vllm,
    "transformers": _check_transformers,
}
