"""A unit's plan as vLLM's arguments and environment. All that differs between CPU and GPU devices is here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.plan import Residency, StagePlan
from nereus_common.engines.devices import CPU, GPU, slot_of
from nereus_common.engines.generation.base import GenerationUnitConfig
from nereus_common.engines.generation.vllm_plugin import OWNER, SPIN, TRANSFER_ENGINE

EXTENSION = "nereus_common.engines.generation.vllm_transfer:WorkerExtension"


def engine_arguments(config: GenerationUnitConfig, extension: str = EXTENSION) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. `extension`: the class mixed into every worker."""
    plan, options = config.plan, config.options
    limits = plan.generation
    if limits is None:
        raise InvalidPlan(f"unit {config.unit}: the plan has no generation limits", field="generation")
    arguments: dict[str, Any] = {
        "model": str(config.model_path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # stop tokens and sampling come with the request, from nowhere else
        "dtype": plan.dtypes.compute,
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": plan.layout.tp,
        "max_model_len": limits.max_length,
        "max_num_seqs": limits.max_sequences,
        "max_num_batched_tokens": max(limits.max_batched_tokens, limits.max_sequences),
        "kv_cache_memory_bytes": limits.kv_bytes,
        "enforce_eager": not limits.graphs,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "seed": config.seed,
        "disable_log_stats": True,
        "worker_extension_cls": extension.replace(":", "."),
        "weight_transfer_config": {"backend": TRANSFER_ENGINE},
        "enable_sleep_mode": plan.idle is not Residency.DEVICE,
    }
    if options.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if options.block_size is not None:
        arguments["block_size"] = options.block_size
    return arguments


def environment(config: GenerationUnitConfig, scratch: Path) -> dict[str, str]:
    """What vLLM's processes must find in their environment, set before vLLM is imported."""
    return {
        OWNER: str(os.getpid()),
        SPIN: str(config.options.spin_seconds),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **_compiler(config.plan),
    } | _devices(config)


def _compiler(plan: StagePlan) -> dict[str, str]:
    """Without graphs nothing is compiled. A few small functions of vLLM would be, by a C++ compiler, at the first
    request and in every rank anew, because the cache lies in the scratch folder."""
    assert plan.generation is not None
    return {} if plan.generation.graphs else {"TORCHDYNAMO_DISABLE": "1"}


def _devices(config: GenerationUnitConfig) -> dict[str, str]:
    devices = config.plan.unit_devices(config.replica)
    slots = [slot_of(device) for device in devices]
    kinds = {kind for kind, _ in slots}
    if kinds == {CPU}:
        numbers = [number for _, number in slots]
        return {"VLLM_CPU_OMP_THREADS_BIND": config.options.omp_threads_bind or _one_core_each(numbers)}
    if kinds == {GPU}:
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(number) for _, number in slots)}
    raise InvalidPlan(
        f"unit {config.unit} lies on {', '.join(map(str, devices))}", remedy="all cpuN or all gpuN", field="devices"
    )


def _one_core_each(numbers: Sequence[int]) -> str:
    """Device cpuN → the N-th core this process may use, around again when there are more devices than cores."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[number % len(cores)]) for number in numbers)


def sleep_level(plan: StagePlan) -> int | None:
    """vLLM's level of sleep for the plan's idle residency; None: nothing is given up."""
    return {Residency.DEVICE: None, Residency.HOST: 1, Residency.DROPPED: 2}[plan.idle]
