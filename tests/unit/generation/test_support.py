from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus_common.core.errors import InvalidInput, InvalidPlan, UnsupportedByEngine
from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, GenerationLimits, Residency, StagePlan
from nereus_common.engines.generation.base import GenerationRequest, GenerationUnitConfig, Sampling
from nereus_common.engines.generation.options import GenerationOptions
from nereus_common.engines.generation.support import check_plan
from nereus_common.engines.generation.vllm_arguments import engine_arguments, environment

pytestmark = pytest.mark.fast
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def _plan(layout: str = "tp1.pp1.fs1", kind: str = "cpu", replicas: int = 1, **changed: Any) -> StagePlan:
    parsed = Layout.parse(layout)
    devices = tuple(DeviceId("n", f"{kind}{slot}") for slot in range(parsed.ranks * replicas))
    return StagePlan(parsed, devices, replicas, **({"generation": GenerationLimits()} | changed))


def test_what_the_demo_runs_is_accepted() -> None:
    check_plan("vllm", CONFIG, _plan("tp1.pp1.fs1", replicas=2))
    check_plan("vllm", CONFIG, _plan("tp3.pp1.fs1"))
    check_plan("transformers", CONFIG, _plan())


@pytest.mark.parametrize(
    ("engine", "config", "plan", "field"),
    [
        ("vllm", {}, _plan("tp1.pp2.fs1"), "layout.pp"),
        ("vllm", {}, _plan("tp1.pp1.fs2"), "layout.fs"),
        ("vllm", {}, _plan("tp3.pp1.fs1.ep3"), "layout.ep"),
        ("vllm", {}, _plan("tp2.pp1.fs1"), "layout.tp"),
        ("vllm", {"num_attention_heads": 12, "num_key_value_heads": 4}, _plan("tp6.pp1.fs1"), "layout.tp"),
        ("vllm", {"head_dim": 48}, _plan(), "model.head_dim"),
        ("vllm", {"architectures": ["GPT2LMHeadModel"]}, _plan(), "model.architecture"),
        ("vllm", {"architectures": ["Qwen3MoeForCausalLM"]}, _plan(), "model.architecture"),
        ("transformers", {"architectures": ["MixtralForCausalLM"]}, _plan(), "model.architecture"),
        ("transformers", {"architectures": ["Gemma2ForCausalLM"]}, _plan(), "model.architecture"),
        ("vllm", {}, _plan(idle=Residency.HOST), "idle"),
        ("vllm", {}, _plan(dtypes=Dtypes(compute="float64")), "dtypes.compute"),
        ("vllm", {}, _plan(dtypes=Dtypes(kv="float32")), "dtypes.kv"),
        ("vllm", {}, _plan(generation=GenerationLimits(max_length=9000)), "generation.max_length"),
        ("vllm", {}, _plan(generation=None), "generation"),
        ("transformers", {}, _plan("tp3.pp1.fs1"), "layout.tp"),
        ("sglang", {}, _plan(), "engine"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_by_field(
    engine: str, config: dict[str, Any], plan: StagePlan, field: str
) -> None:
    with pytest.raises(UnsupportedByEngine) as caught:
        check_plan(engine, CONFIG | config, plan)
    assert caught.value.details["field"] == field
    assert caught.value.remedy


def test_a_gpu_may_give_up_its_weights_when_idle() -> None:
    check_plan("vllm", CONFIG, _plan(kind="gpu", idle=Residency.HOST))


def _config(plan: StagePlan, replica: int = 0, **options: Any) -> GenerationUnitConfig:
    return GenerationUnitConfig(
        "u", Path("/model"), plan, Path("/logs"), replica, options=GenerationOptions.from_mapping(options)
    )


def test_each_rank_is_bound_to_the_core_of_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    two = _plan(replicas=2)
    bound = [environment(_config(two, replica), tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] for replica in (0, 1)]
    assert bound == ["0", "1"]
    assert environment(_config(_plan("tp3.pp1.fs1")), tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|0"
    asked = _config(two, omp_threads_bind="0-1")
    assert environment(asked, tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_a_unit_on_gpus_sees_its_own_devices_only(tmp_path: Path) -> None:
    plan = _plan("tp2.pp1.fs1", kind="gpu", replicas=2)
    assert environment(_config(plan, 1), tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,3"
    mixed = replace(plan, devices=(*plan.devices[:3], DeviceId("n", "cpu0")))
    with pytest.raises(InvalidPlan, match="all cpuN or all gpuN"):
        environment(_config(mixed, 1), tmp_path)


def test_the_plan_decides_the_engines_limits() -> None:
    limits = GenerationLimits(max_sequences=9, max_batched_tokens=77, max_length=300, kv_bytes=123, graphs=True)
    arguments = engine_arguments(_config(_plan("tp3.pp1.fs1", generation=limits)))
    assert arguments["tensor_parallel_size"] == 3
    assert arguments["max_num_seqs"] == 9
    assert arguments["max_num_batched_tokens"] == 77
    assert arguments["max_model_len"] == 300
    assert arguments["kv_cache_memory_bytes"] == 123
    assert arguments["enforce_eager"] is False


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InvalidInput, match="blok_size is unknown"):
        GenerationOptions.from_mapping({"blok_size": 1})


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}])
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Sampling(**({"max_tokens": 1} | wrong))
    with pytest.raises(InvalidInput):
        GenerationRequest("r", (), Sampling(1))
