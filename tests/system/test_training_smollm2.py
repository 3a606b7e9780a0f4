"""A real pretrained model: tensor parallelism of three, and the float32 head in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.ids import TensorName
from nereus_common.engines.training.base import TensorState
from nereus_common.rl.rollouts import RolloutBatch
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import make_batch, make_plan, rank_configs, step_spec, update

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TOLERANCE = 2e-4
"""Relative L2 per tensor, float32, of gradients of 30 layers; the two layouts differ in the order of every sum."""


def state_after(ranks: RankProcesses, model: Path, layout: str, batch: RolloutBatch, dtype: str) -> dict[str, Any]:
    plan = make_plan(layout, dtype=dtype, microbatch_tokens=512)
    spec = step_spec(batch, max_grad_norm=0.0, learning_rate=1e-5, temperature=1.0)
    outcomes = ranks.run(update, [(c, None, batch.columns(), [spec]) for c in rank_configs(model, plan)], timeout=600)
    moments: dict[TensorName, list[TensorState]] = {}
    for _, state, _ in outcomes:
        for name, held in state.items():
            moments.setdefault(name, []).append(held)
    return {"metrics": outcomes[0][0].metrics, "moments": moments}


def whole_gradient(parts: list[TensorState]) -> np.ndarray:
    whole = np.zeros(tuple(map(max, *(part.box.stop for part in parts))) if len(parts) > 1 else parts[0].box.stop)
    for part in parts:
        whole[part.box.slices] = part.exp_avg * 10
    return whole


def test_three_way_tensor_parallelism_gives_the_same_update(smollm2: Path, ranks: RankProcesses) -> None:
    batch = make_batch(groups=2, per_group=3)
    one = state_after(ranks, smollm2, "tp1.pp1.fs1", batch, "float32")
    three = state_after(ranks, smollm2, "tp3.pp1.fs1", batch, "float32")
    assert three["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-5)
    for name, parts in one["moments"].items():
        expected, found = whole_gradient(parts), whole_gradient(three["moments"][name])
        assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected), name


def test_bfloat16_log_probs_stay_near_float32(smollm2: Path, ranks: RankProcesses) -> None:
    batch = make_batch(groups=2, per_group=3)
    exact = state_after(ranks, smollm2, "tp1.pp1.fs1", batch, "float32")["metrics"]
    rounded = state_after(ranks, smollm2, "tp1.pp1.fs1", batch, "bfloat16")["metrics"]
    assert rounded["entropy"] == pytest.approx(exact["entropy"], rel=0.02)
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
