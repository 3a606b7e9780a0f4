"""A step of several updates: what each of them starts from, and what its ratio is to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.ids import Head
from nereus_common.core.plan import Recompute, StagePlan
from nereus_common.engines.training.base import TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import (
    Whole,
    assemble,
    make_batch,
    make_plan,
    rank_configs,
    save_model,
    shares,
    step_spec,
    update,
    warm_state,
    with_minibatches,
)
from tests.system.training_reference import reference_step

TOLERANCE = 2e-5
"""Relative L2 per tensor, float32, after six updates."""

FEW = ["tp1.pp1.fs1", "tp1.pp1.fs2", "tp2.pp1.fs1", "tp1.pp2.fs1", "tp1.pp1.fs1 x2", "tp2.pp2.fs1", "tp1.pp2.fs1 x2"]
ALL = [
    f"tp{tp}.pp{pp}.fs{fs}" + (f" x{replicas}" if replicas > 1 else "")
    for tp, pp, fs, replicas in product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    if tp * pp * fs * replicas <= 4
]
CLIPPED = {"name": "policy", "clip_low": 0.02, "clip_high": 0.03, "tis_cap": 2.0}
"""Bounds so close that they bind within a few updates."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Head, Path]:
    return {head: save_model("llama-tied", tmp_path_factory.mktemp(head), head=head) for head in Head}


def step(
    ranks: RankProcesses,
    folder: Path,
    plan: StagePlan,
    batch: RolloutBatch,
    spec: TrainStepSpec,
    whole: Whole | None = None,
    head: Head = Head.LM,
) -> tuple[Mapping[str, float], list[Any]]:
    """Metrics, and the states of the ranks."""
    parts = shares(batch, plan.replicas)
    configs = rank_configs(folder, plan, head=head)
    outcomes = ranks.run(update, [(c, whole, parts[c.replica].columns(), [spec]) for c in configs])
    assert all(result.metrics == outcomes[0][0].metrics for result, _, _ in outcomes)
    return outcomes[0][0].metrics, [state for _, state, _ in outcomes]


def check_against_reference(
    layouts: list[str], folder: Path, loss: Mapping[str, Any], head: Head, ranks: RankProcesses
) -> None:
    batch, whole = make_batch(groups=5, minibatches=3), warm_state(folder)
    spec = step_spec(batch, loss=loss, epochs=2, learning_rate=1e-3)
    expected = reference_step(folder, whole, batch, spec, head=head)
    norms = [expected.norm(number) for number in range(6)]
    for layout in layouts:
        metrics, states = step(ranks, folder, make_plan(layout), batch, spec, whole, head)
        assert metrics["updates"] == 6 and metrics["tokens"] == batch.loss_tokens
        assert metrics["loss"] == pytest.approx(np.mean(expected.losses), rel=1e-4, abs=1e-6), layout
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4), layout
        assert metrics["grad_norm_max"] == pytest.approx(max(norms), rel=1e-4), layout
        found = assemble(states, whole)
        for tensor, after in expected.after.items():
            assert (found[tensor][3] == 16).all(), "one count per update"
            for value, wanted in zip(found[tensor][:3], after, strict=True):
                assert np.linalg.norm(value - wanted) <= TOLERANCE * np.linalg.norm(wanted), (layout, tensor)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_two_epochs_of_three_minibatches_are_the_six_updates_of_one_process(
    ratio: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    check_against_reference(FEW, folders[Head.LM], {**CLIPPED, "ratio": ratio}, Head.LM, ranks)


def test_a_critic_makes_the_same_updates_in_every_layout(folders: dict[Head, Path], ranks: RankProcesses) -> None:
    check_against_reference(FEW, folders[Head.SCORE], {"name": "value", "clip": 0.3}, Head.SCORE, ranks)


@pytest.mark.long
@pytest.mark.parametrize("head", list(Head))
def test_six_updates_agree_over_all_mixes_of_up_to_four_ranks(
    head: Head, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    loss = CLIPPED if head is Head.LM else {"name": "value", "clip": 0.3}
    check_against_reference(ALL, folders[head], loss, head, ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_while_nothing_is_learnt_every_ratio_is_exactly_one(
    dtype: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch = make_batch(groups=5, minibatches=3)
    spec = step_spec(batch, loss=CLIPPED, epochs=2, learning_rate=0.0)
    full = [(layout, Recompute.FULL) for layout in ("tp1.pp1.fs2", "tp2.pp2.fs1")]
    for layout, recompute in [*((layout, Recompute.NONE) for layout in FEW), *full]:
        plan = make_plan(layout, dtype, microbatch_tokens=48, recompute=recompute)
        metrics, _ = step(ranks, folders[Head.LM], plan, batch, spec)
        assert metrics["ratio_max"] == 1.0 and metrics["ratio"] == 1.0, (layout, recompute)
        assert metrics["clip_fraction"] == 0.0


def test_the_ratio_of_a_single_update_is_exactly_one(folders: dict[Head, Path], ranks: RankProcesses) -> None:
    batch = make_batch()
    metrics, _ = step(ranks, folders[Head.LM], make_plan("tp1.pp2.fs1"), batch, step_spec(batch))
    assert metrics["ratio_max"] == 1.0 and metrics["updates"] == 1
    assert metrics["grad_norm"] == metrics["grad_norm_max"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_minibatch_sees_what_the_first_has_learnt(
    dtype: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    once = make_batch(groups=2)
    twice = with_minibatches(once.select_groups([0, 1, 0, 1]), 2)
    spec = step_spec(twice, learning_rate=1e-2)
    for layout in FEW:
        metrics, _ = step(ranks, folders[Head.LM], make_plan(layout, dtype), twice, spec)
        assert metrics["ratio_max"] > 1.01, f"{layout}: the second update ran on weights gathered before the first"
        assert metrics["ratio"] != 1.0


def test_the_gap_to_the_sampler_is_that_of_the_policy_before_the_step(
    folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch = make_batch(groups=5, minibatches=3)
    spec = {rate: step_spec(batch, epochs=2, learning_rate=rate) for rate in (0.0, 1e-2)}
    for layout in ("tp1.pp1.fs1", "tp1.pp2.fs1 x2"):
        still, moved = (step(ranks, folders[Head.LM], make_plan(layout), batch, one)[0] for one in spec.values())
        assert (still["logprob_gap"], still["logprob_gap_max"]) == (moved["logprob_gap"], moved["logprob_gap_max"])
        assert still["approx_kl"] != moved["approx_kl"]


def test_only_tokens_of_the_steps_own_version_tell_of_the_gap(folders: dict[Head, Path], ranks: RankProcesses) -> None:
    batch = make_batch(minibatches=2)
    fresh = np.zeros_like(batch.versions)
    old = np.full_like(fresh, -1)
    mixed = np.where(np.arange(len(fresh)) == np.flatnonzero(batch.mask)[0], fresh, old)
    seen = {}
    for name, versions in {"fresh": fresh, "old": old, "mixed": mixed}.items():
        one = batch.with_columns(versions=versions)
        seen[name], _ = step(ranks, folders[Head.LM], make_plan("tp1.pp1.fs2"), one, step_spec(one))
    assert 0 < seen["fresh"]["logprob_gap"] < seen["fresh"]["logprob_gap_max"]
    assert seen["mixed"]["logprob_gap"] == seen["mixed"]["logprob_gap_max"]
    assert not [name for name in seen["old"] if name.startswith("logprob_gap")]
    assert all(math.isfinite(value) for value in seen["old"].values())
