"""One update from the same state on the same batch is the same update in every layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from nereus_common.core.ids import TensorName
from nereus_common.core.layout import Layout
from nereus_common.engines.torch_model.limits import read_config
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import TRAINING
from nereus_common.state.oracle import shard_boxes
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import (
    MODELS,
    assemble,
    make_batch,
    make_plan,
    rank_configs,
    save_model,
    shares,
    step_spec,
    update,
    warm_state,
)
from tests.system.training_reference import reference_step

TOLERANCE = 1e-5
"""Relative L2 per tensor, float32."""

MIXES = [
    f"tp{tp}.pp{pp}.fs{fs}" + (f" x{replicas}" if replicas > 1 else "")
    for tp, pp, fs, replicas in product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    if tp * pp * fs * replicas <= 4
]
UNEVEN = ["tp1.pp2(3+1).fs1", "tp2.pp2(1+3).fs1", "tp1.pp3(1+2+1).fs1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-biased"])
def test_one_update_agrees_over_all_mixes_of_up_to_four_ranks(
    name: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    whole, batch = warm_state(folders[name]), make_batch()
    spec = step_spec(batch)
    expected = reference_step(folders[name], whole, batch, spec)
    norm = expected.norm(0)
    clipped = min(1.0, spec.max_grad_norm / norm)
    assert clipped < 1
    for mix in [*MIXES, *UNEVEN]:
        plan = make_plan(mix)
        parts = shares(batch, plan.replicas)
        configs = rank_configs(folders[name], plan)
        outcomes = ranks.run(update, [(c, whole, parts[c.replica].columns(), [spec]) for c in configs])
        assert {result.metrics["grad_norm"] for result, _, _ in outcomes} == {outcomes[0][0].metrics["grad_norm"]}
        assert outcomes[0][0].metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE), mix
        found = assemble([state for _, state, _ in outcomes], whole)
        for tensor, after in expected.after.items():
            gradient = expected.gradients[0][tensor]
            parameter, first, second, step = found[tensor]
            assert (step == 11).all(), (mix, tensor)
            taken = (first - np.float32(0.9) * whole[tensor][1]) / np.float32(0.1)
            assert distance(taken, gradient * clipped) <= TOLERANCE, (mix, tensor, "gradient")
            for value, wanted in zip((parameter, first, second), after, strict=True):
                assert distance(value, wanted) <= TOLERANCE, (mix, tensor)


@pytest.mark.parametrize("mix", ["tp2.pp1.fs2", "tp2.pp2.fs1"])
def test_biases_behind_a_row_parallel_matrix_are_added_once(
    mix: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    whole, batch = warm_state(folders["llama-biased"]), make_batch()
    spec = step_spec(batch)
    expected = reference_step(folders["llama-biased"], whole, batch, spec)
    configs = rank_configs(folders["llama-biased"], make_plan(mix))
    outcomes = ranks.run(update, [(config, whole, batch.columns(), [spec]) for config in configs])
    found = assemble([state for _, state, _ in outcomes], whole)
    for tensor, after in expected.after.items():
        for value, wanted in zip(found[tensor][:3], after, strict=True):
            assert distance(value, wanted) <= TOLERANCE, tensor


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("mix", ["tp1.pp1.fs3", "tp2.pp1.fs2", "tp2.pp2(3+1).fs1", "tp1.pp2.fs2", "tp1.pp1.fs2 x2"])
def test_the_boxes_held_are_those_of_the_layout_oracle(
    name: str, mix: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    plan, batch = make_plan(mix), make_batch()
    shape = ModelShape.from_config(read_config(str(folders[name])))
    configs = rank_configs(folders[name], plan)
    outcomes = ranks.run(update, [(config, None, batch.columns(), []) for config in configs])
    for config, (_, _, held) in zip(configs, outcomes, strict=True):
        expected = shard_boxes(shape, plan.layout, config.rank, TRAINING)
        assert held == {tensor: boxes for tensor, boxes in expected.items() if boxes}, (mix, config.rank)


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage_only() -> None:
    shape = ModelShape.from_config({**MODELS["llama-tied"], "architectures": ["LlamaForCausalLM"]})
    name = TensorName("model.embed_tokens.weight")
    layout = Layout.parse("tp1.pp4.fs1")
    held = [bool(shard_boxes(shape, layout, rank, TRAINING).get(name)) for rank in range(4)]
    assert held == [True, False, False, True]
