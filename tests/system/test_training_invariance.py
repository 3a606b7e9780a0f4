"""Loss and gradient of an update are those of the whole batch, however it is cut: over microbatches, replicas, fs, pp
and tp, with and without shared prompts, whatever weighs the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.ids import Head
from nereus_common.engines.training.base import TrainingOptions
from nereus_common.rl.weights import Aggregation
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import (
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

OBJECTIVES: dict[str, tuple[dict[str, Any], Aggregation, Head]] = {
    "token mean": ({"name": "policy"}, "token", Head.LM),
    "sequence mean": ({"name": "policy", "tis_cap": 2.0}, "sequence", Head.LM),
    "constant": ({"name": "policy"}, "constant", Head.LM),
    "sequence ratio": ({"name": "policy", "ratio": "sequence"}, "sequence", Head.LM),
    "value": ({"name": "value", "clip": 0.2}, "token", Head.SCORE),
}
CUTS = [
    ("tp1.pp1.fs1", 16, True),  # every group in packs of its own
    ("tp1.pp1.fs1", 4096, True),
    ("tp1.pp1.fs1", 96, False),
    ("tp1.pp1.fs2", 96, True),
    ("tp1.pp2.fs1", 4096, True),  # one pack would do: the other is empty
    ("tp1.pp1.fs1 x2", 96, True),
    ("tp2.pp1.fs1", 96, True),
    ("tp2.pp2.fs1", 32, False),
    ("tp1.pp1.fs2 x2", 4096, True),  # more ranks than some have packs for
    ("tp1.pp2.fs1 x2", 64, True),
    ("tp1.pp1.fs1 x3", 96, False),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Head, Path]:
    return {head: save_model("llama-tied", tmp_path_factory.mktemp(head), head=head) for head in Head}


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_loss_and_gradient_do_not_depend_on_the_cut(
    objective: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    loss, aggregation, head = OBJECTIVES[objective]
    batch = make_batch(aggregation=aggregation)
    folder, still = folders[head], replace(step_spec(batch, loss=loss), max_grad_norm=0.0)
    whole = {name: (array, np.zeros_like(array), second) for name, (array, _, second) in warm_state(folder).items()}
    expected = reference_step(folder, whole, batch, still, aggregation, head)
    for layout, microbatch_tokens, shared_prefix in CUTS:
        plan = make_plan(layout, microbatch_tokens=microbatch_tokens)
        options = TrainingOptions(threads=1, shared_prefix=shared_prefix)
        parts = shares(batch, plan.replicas)
        configs = rank_configs(folder, plan, options, head=head)
        outcomes = ranks.run(update, [(c, whole, parts[c.replica].columns(), [still]) for c in configs])
        metrics = outcomes[0][0].metrics
        assert all(result.metrics == metrics for result, _, _ in outcomes), layout
        assert metrics["loss"] == pytest.approx(expected.losses[0], rel=1e-5, abs=1e-6), layout
        assert metrics["grad_norm"] == pytest.approx(expected.norm(0), rel=TOLERANCE), layout
        found = assemble([state for _, state, _ in outcomes], whole)
        for tensor, gradient in expected.gradients[0].items():
            taken = found[tensor][1] / np.float32(0.1)
            assert np.linalg.norm(taken - gradient) <= TOLERANCE * np.linalg.norm(gradient), (layout, tensor)


@pytest.mark.parametrize("head", list(Head))
def test_a_minibatch_of_which_a_replica_has_no_group_is_the_same_minibatch(
    head: Head, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch = make_batch(groups=3, minibatches=3)
    loss = {"name": "policy"} if head is Head.LM else {"name": "value", "clip": 0.2}
    whole, spec = warm_state(folders[head]), step_spec(batch, loss=loss, learning_rate=1e-4)
    expected = reference_step(folders[head], whole, batch, spec, head=head)
    for layout in ("tp1.pp1.fs1 x2", "tp1.pp2.fs1 x2", "tp1.pp1.fs2 x2"):
        plan = make_plan(layout)
        parts = shares(batch, 2)
        assert sorted(part.groups for part in parts) == [1, 2]
        configs = rank_configs(folders[head], plan, head=head)
        outcomes = ranks.run(update, [(c, whole, parts[c.replica].columns(), [spec]) for c in configs])
        found = assemble([state for _, state, _ in outcomes], whole)
        for tensor, after in expected.after.items():
            for value, wanted in zip(found[tensor][:3], after, strict=True):
                assert np.linalg.norm(value - wanted) <= TOLERANCE * np.linalg.norm(wanted), (layout, tensor)
