"""Nominal seconds of phases, counted by hand for a small model."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import ModelStage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import GenerationLimits, Recompute, StagePlan
from nereus_common.planning.counts import rank_shape, weights_read
from nereus_common.planning.demand import (
    BEGIN_SECONDS,
    CALL_SECONDS,
    OPTIMIZER_PASSES,
    Demand,
    generation,
    inference,
    pull,
    training,
)
from nereus_common.planning.hardware import Cluster, NodeKind, Processor
from nereus_common.planning.placements import Placements
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

MODEL = ModelShape("llama", 4, 64, 192, 8, 4, 8, 256, tied=False)
PARAMETERS = MODEL.parameters
WORK = Workload(groups=8, samples=2, prompt=10, responses=(4.0, 8.0), minibatches=2, epochs=3)
PEAK, STREAM, INSIDE, OUTSIDE = 1e9, 1e8, 1e7, 1e6
CHIP = Processor("chip", MappingProxyType({"float32": PEAK / 2, "bfloat16": PEAK}), 1 << 30, STREAM)
CLUSTER = Cluster({f"node{number}": NodeKind(CHIP, 4, INSIDE, OUTSIDE) for number in range(2)})
CORES = Cluster({"node0": NodeKind(replace(CHIP, name="cpu"), 4, INSIDE, OUTSIDE)})
OTHER = parse_replicated("tp4.pp1.fs1")[0]
ONE = (parse_replicated("tp1.pp1.fs1")[0], 0)


def site(name: str, layout: str, cluster: Cluster = CLUSTER, first: int = 0, **more: Any) -> Placements:
    """Behind one of another layout, which must not make a difference."""
    parsed, replicas = parse_replicated(layout)
    devices = cluster.devices[first : first + parsed.ranks * replicas]
    plan, other = StagePlan(parsed, devices, replicas, **more), StagePlan(OTHER, cluster.devices[:4], **more)
    return Placements.of(MODEL, ModelStage.parse(name), [other, plan], cluster)


def second(demand: Demand) -> dict[str, float]:
    return {name: float(column[1]) for name, column in demand.items() if column[1]}


def of_training(layout: str, cluster: Cluster = CLUSTER, first: int = 0, **more: Any) -> dict[str, float]:
    return second(training(site("actor/training", layout, cluster, first, **more), WORK))


def test_one_rank_computes_streams_and_sends_nothing() -> None:
    found, shape, rows = (
        of_training("tp1.pp1.fs1"),
        rank_shape(MODEL, ModelStage.parse("a/training").stage, *ONE),
        WORK.packed(),
    )
    forward = shape.forward(rows)
    assert found["training.gemm"] == pytest.approx(3 * 3 * forward.gemm / PEAK)
    assert found["training.attention"] == pytest.approx(3 * 3 * forward.attention / PEAK)
    assert found["training.memory"] == pytest.approx(6 * PARAMETERS * 4 * OPTIMIZER_PASSES / STREAM)
    assert found["training.call"] == pytest.approx(6 * 4 * 3 * CALL_SECONDS)
    assert found.keys() == {f"training.{name}" for name in ("gemm", "attention", "memory", "call", "begin")}


def test_recomputation_costs_a_forward_pass_of_the_layers() -> None:
    plain, again = of_training("tp1.pp1.fs1"), of_training("tp1.pp1.fs1", recompute=Recompute.FULL)
    assert again["training.attention"] == pytest.approx(plain["training.attention"] * 4 / 3)
    assert plain["training.gemm"] < again["training.gemm"] < plain["training.gemm"] * 4 / 3


def test_tensor_ranks_share_the_work_and_reduce_every_row_twice_a_layer_and_direction() -> None:
    found, one = of_training("tp2.pp1.fs1"), of_training("tp1.pp1.fs1")
    assert found["training.gemm"] == pytest.approx(one["training.gemm"] / 2)
    sent = 3 * WORK.packed().rows * 64 * 2 * 2 * 2 * 4 * (2 * (2 - 1) / 2)
    assert found["all_reduce.node"] == pytest.approx(sent / INSIDE)


def test_shards_gather_what_they_compute_with_and_scatter_gradients() -> None:
    found = of_training("tp1.pp1.fs2")
    assert found["all_gather.node"] == pytest.approx(6 * PARAMETERS * 2 / 2 / INSIDE)
    assert found["reduce_scatter.node"] == pytest.approx(6 * PARAMETERS * 4 / 2 / INSIDE)
    assert found["training.memory"] == pytest.approx(of_training("tp1.pp1.fs1")["training.memory"] / 2)


def test_replicas_reduce_gradients_and_over_the_network_where_a_node_is_too_small() -> None:
    near, far = of_training("tp1.pp1.fs1 x2"), of_training("tp1.pp1.fs1 x2", first=3)
    assert near["all_reduce.node"] == pytest.approx(6 * PARAMETERS * 4 / INSIDE)
    assert far["all_reduce.network"] == pytest.approx(6 * PARAMETERS * 4 / OUTSIDE)


def test_a_pipeline_waits_for_its_first_and_last_microbatch() -> None:
    """80 rows a minibatch in microbatches of 32: three, for which two stages need four turns."""
    rows = WORK.packed().rows / 2
    assert rows == 80
    found, one = of_training("tp1.pp2.fs1", microbatch_tokens=32), of_training("tp1.pp1.fs1", microbatch_tokens=32)
    assert found["training.attention"] == pytest.approx(one["training.attention"] / 2 * 4 / 3)
    assert found["p2p.node"] == pytest.approx(6 * 2 * rows * 64 * 2 / INSIDE)


def test_cores_that_ranks_share_are_not_there_twice() -> None:
    for layout in ("tp2.pp1.fs1", "tp1.pp1.fs2", "tp1.pp1.fs1 x2"):
        shared, alone = of_training(layout, CORES), of_training("tp1.pp1.fs1", CORES)
        assert shared["training.gemm"] == pytest.approx(alone["training.gemm"])


def test_inference_is_one_forward_pass() -> None:
    found = second(inference(site("reference/inference", "tp1.pp1.fs1 x2"), WORK))
    forward = rank_shape(MODEL, ModelStage.parse("a/inference").stage, *ONE).forward(WORK.packed().share(2))
    assert found["inference.gemm"] == pytest.approx(forward.gemm / PEAK)


LIMITS = GenerationLimits(max_sequences=64, kv_bytes=1 << 20)


def of_generation(layout: str, limits: GenerationLimits = LIMITS, work: Workload = WORK) -> dict[str, float]:
    return second(generation(site("actor/generation", layout, generation=limits), work))


def test_few_sequences_decode_at_the_pace_of_memory_and_many_at_that_of_products() -> None:
    few, many = replace(WORK, groups=1, samples=1), replace(WORK, groups=64, samples=16)
    roomy = GenerationLimits(max_sequences=4096, kv_bytes=1 << 30)
    weights = (PARAMETERS - 256 * 64 - 9 * 64) * 2
    slow = of_generation("tp1.pp1.fs1", roomy, few)
    assert slow["generation.memory"] == pytest.approx(4 * weights / STREAM, rel=0.02)
    fast = of_generation("tp1.pp1.fs1", roomy, many)
    assert fast["generation.gemm"] > fast.get("generation.memory", 0.0)


def test_more_sequences_than_slots_take_turns() -> None:
    turns = [
        of_generation("tp1.pp1.fs1", replace(LIMITS, max_sequences=slots))["generation.call"] for slots in (16, 8, 4)
    ]
    assert turns[0] < turns[1] < turns[2]


def test_a_cache_that_is_too_small_leaves_slots_empty() -> None:
    position = 2 * 4 * 8 * 4 * 2
    small = replace(LIMITS, kv_bytes=4 * 16 * position)
    assert of_generation("tp1.pp1.fs1", small) == of_generation("tp1.pp1.fs1", replace(LIMITS, max_sequences=4))


def test_units_share_the_groups() -> None:
    one, two = of_generation("tp1.pp1.fs1"), of_generation("tp1.pp1.fs1 x2")
    assert two["generation.attention"] == pytest.approx(one["generation.attention"] / 2)


def test_experts_that_no_row_is_sent_to_are_not_read() -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    shape = rank_shape(ModelShape.from_config(config), ModelStage.parse("a/training").stage, *ONE)
    one, many = weights_read(shape.body, shape.experts, 2 / 8, np.array([1.0, 1e6]))
    assert one == shape.body
    assert many - one == pytest.approx(2 * 8 * 3 * 64 * 96 * 3 / 4)


def test_a_sync_is_bound_by_what_is_lacking() -> None:
    found = pull(site("actor/generation", "tp1.pp1.fs1 x2", CORES, generation=LIMITS), np.array([0.0, 1e6]))
    assert second(found) == {
        "pull.node": 1e6 / INSIDE,
        "sync.memory": 1e6 / (STREAM / 2),
        "sync.begin": BEGIN_SECONDS,
    }


def test_generation_in_a_pipeline_is_refused() -> None:
    with pytest.raises(InvalidPlan) as refused:
        of_generation("tp1.pp2.fs1")
    assert refused.value.details["field"] == "stages.actor/generation.layout"
