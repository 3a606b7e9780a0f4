"""What a training unit promises besides being right in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput, JobFailed, NereusError, NotFound, StaleVersion
from nereus_common.core.plan import Recompute
from nereus_common.engines.options import Optimizer
from nereus_common.engines.training.base import TrainingOptions, TrainingRankConfig, TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.state.digest import combine, digest_box
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
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama-tied", tmp_path_factory.mktemp("model"))


def parameters_after(
    ranks: RankProcesses, configs: list[TrainingRankConfig], whole: Whole, batch: RolloutBatch, replicas: int = 1
) -> tuple[dict[Any, Any], dict[str, float]]:
    parts = shares(batch, replicas) if replicas > 1 else [batch]
    outcomes = ranks.run(update, [(c, whole, parts[c.replica].columns(), [step_spec(batch)]) for c in configs])
    return assemble([state for _, state, _ in outcomes], whole), dict(outcomes[0][0].metrics)


def assert_same(found: dict[Any, Any], expected: dict[Any, Any], tolerance: float = 1e-5) -> None:
    for name, values in expected.items():
        for one, other in zip(found[name], values, strict=True):
            assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name


def test_the_update_does_not_depend_on_how_the_batch_is_packed(model: Path, ranks: RankProcesses) -> None:
    whole, batch = warm_state(model), make_batch()
    expected, metrics = parameters_after(ranks, rank_configs(model, make_plan("tp1.pp1.fs1")), whole, batch)
    variants = [
        (make_plan("tp1.pp1.fs1", microbatch_tokens=16), TrainingOptions(threads=1)),
        (make_plan("tp1.pp1.fs1", microbatch_tokens=4096), TrainingOptions(threads=1)),
        (make_plan("tp1.pp1.fs1"), TrainingOptions(threads=1, shared_prefix=False)),
        (make_plan("tp1.pp1.fs1", recompute=Recompute.FULL), TrainingOptions(threads=1)),
        (make_plan("tp1.pp2.fs1", recompute=Recompute.FULL, microbatch_tokens=16), TrainingOptions(threads=1)),
    ]
    for plan, options in variants:
        found, same = parameters_after(ranks, rank_configs(model, plan, options), whole, batch)
        assert_same(found, expected)
        assert same == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_masked_sequences_change_nothing_and_count_nothing(model: Path, ranks: RankProcesses) -> None:
    whole, batch = warm_state(model), make_batch()
    kept = [index for index in range(batch.groups) if index != 1]
    masked = batch.mask.copy()
    masked[batch.span(4).start : batch.span(7).stop] = False
    configs = rank_configs(model, make_plan("tp1.pp1.fs2"))
    found, _ = parameters_after(ranks, configs, whole, batch.with_columns(mask=masked))
    expected, _ = parameters_after(
        ranks, rank_configs(model, make_plan("tp1.pp1.fs1")), whole, batch.select_groups(kept)
    )
    assert_same(found, expected)


def test_a_unit_without_any_group_takes_part_in_the_update(model: Path, ranks: RankProcesses) -> None:
    whole, batch = warm_state(model), make_batch(groups=1)
    expected, _ = parameters_after(ranks, rank_configs(model, make_plan("tp1.pp1.fs1")), whole, batch)
    for layout in ("tp1.pp1.fs2 x2", "tp1.pp2.fs1 x2"):
        found, _ = parameters_after(ranks, rank_configs(model, make_plan(layout)), whole, batch, replicas=2)
        assert_same(found, expected)


def test_bfloat16_computes_near_float32_on_float32_masters(model: Path, ranks: RankProcesses) -> None:
    whole, batch = warm_state(model), make_batch()
    expected, metrics = parameters_after(ranks, rank_configs(model, make_plan("tp1.pp1.fs1")), whole, batch)
    for layout in ("tp1.pp1.fs1", "tp2.pp1.fs2", "tp1.pp2.fs1 x2"):
        plan = make_plan(layout, dtype="bfloat16")
        found, near = parameters_after(ranks, rank_configs(model, plan), whole, batch, plan.replicas)
        assert near["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=0.03)
        assert near["loss"] == pytest.approx(metrics["loss"], abs=0.02)
        for name, (parameter, *_) in found.items():
            assert parameter.dtype == np.float32
            np.testing.assert_allclose(parameter, expected[name][0], atol=2.1e-3)


def two_steps_and_a_repeat(config: TrainingRankConfig, columns: dict[str, Any], spec: TrainStepSpec) -> dict[str, Any]:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        errors = [_error_of(lambda: engine.digest("bfloat16")), _error_of(lambda: engine.train_step(spec, columns))]
        engine.load(0)
        first = engine.train_step(spec, columns)
        digest = engine.digest("float32")
        repeat = engine.train_step(spec, columns)
        unchanged = engine.digest("float32") == digest
        second = engine.train_step(replace(spec, step=1), columns)
        errors.append(_error_of(lambda: engine.train_step(spec, columns)))
        return {
            "same": first is repeat and unchanged,
            "moved": engine.digest("float32") != digest,
            "versions": (first.version, second.version, engine.version),
            "phases": sorted(first.seconds),
            "peak": first.peak_memory_bytes,
            "errors": errors,
        }
    finally:
        engine.close()


def _error_of(call: Any) -> NereusError | None:
    try:
        call()
    except NereusError as error:
        return error
    return None


def test_a_repeated_step_returns_the_first_result_and_a_stale_one_is_refused(model: Path, ranks: RankProcesses) -> None:
    batch = make_batch()
    (config,) = rank_configs(model, make_plan("tp1.pp1.fs1"))
    (seen,) = ranks.run(two_steps_and_a_repeat, [(config, batch.columns(), step_spec(batch))])
    assert seen["same"] and seen["moved"]
    assert seen["versions"] == (1, 2, 2)
    assert seen["phases"] == ["forward_backward", "optimizer", "pack"]
    assert seen["peak"] > 1 << 26
    assert [type(error) for error in seen["errors"]] == [NotFound, StaleVersion, StaleVersion]


def wrong_then_right(
    config: TrainingRankConfig,
    wrong: list[tuple[dict[str, Any], TrainStepSpec]],
    columns: dict[str, Any],
    spec: TrainStepSpec,
) -> tuple[list[NereusError | None], float]:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        before = engine.digest("float32")
        errors = [_error_of(lambda c=c, s=s: engine.train_step(s, c)) for c, s in wrong]
        assert engine.digest("float32") == before, errors
        return errors, engine.train_step(spec, columns).metrics["grad_norm"]
    finally:
        engine.close()


def test_a_refused_step_changes_nothing_and_the_next_one_is_clean(model: Path, ranks: RankProcesses) -> None:
    batch = make_batch()
    columns, spec = batch.columns(), step_spec(batch)
    nan = batch.advantages.copy()
    nan[np.flatnonzero(batch.mask)[0]] = np.nan
    kl = {"name": "policy", "kl_beta": 0.1}
    far_off = np.full(batch.mask.shape, 1e4, np.float32)
    wrong = [
        ({**columns, "advantages": nan}, spec),
        ({k: v for k, v in columns.items() if k != "mask"}, spec),
        (columns, replace(spec, loss={"name": "policy", "clip": 1})),
        (columns, replace(spec, loss=kl)),
        (columns, replace(spec, minibatch_tokens=(batch.loss_tokens + 1,))),
        ({**columns, "reference": far_off}, replace(spec, loss={**kl, "kl_gradient": "plain"})),
    ]
    configs = rank_configs(model, make_plan("tp1.pp1.fs2"))
    outcomes = ranks.run(wrong_then_right, [(config, wrong, columns, spec) for config in configs])
    (alone,) = ranks.run(wrong_then_right, [(rank_configs(model, make_plan("tp1.pp1.fs1"))[0], [], columns, spec)])
    for errors, norm in outcomes:
        assert [type(error) for error in errors] == [InvalidInput] * 5 + [JobFailed]
        assert [error.details.get("field") for error in errors if error][:5] == [
            "advantages",
            "mask",
            "loss.clip",
            "reference",
            "minibatch_tokens",
        ]
        assert norm == pytest.approx(alone[1], rel=1e-6)


def lose_a_rank(config: TrainingRankConfig, columns: dict[str, Any], spec: TrainStepSpec) -> NereusError | None:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        if config.rank == 1:
            return None
        return _error_of(lambda: engine.train_step(spec, columns))
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["tp2.pp1.fs1", "tp1.pp2.fs1", "tp1.pp1.fs2"])
def test_a_missing_rank_ends_the_wait_in_a_named_error(layout: str, model: Path, ranks: RankProcesses) -> None:
    batch = make_batch()
    configs = [replace(config, collective_timeout=5.0) for config in rank_configs(model, make_plan(layout))]
    outcomes = ranks.run(lose_a_rank, [(config, batch.columns(), step_spec(batch)) for config in configs], timeout=60)
    assert outcomes[0] is not None and outcomes[0].reason in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
    assert "unit0 rank 0" in str(outcomes[0]) and "update 0" in str(outcomes[0])


def test_loading_reads_a_checkpoint_of_several_files(model: Path, tmp_path: Path, ranks: RankProcesses) -> None:
    cut = save_model("llama-tied", tmp_path / "cut", max_shard_size="20KB")
    assert len(list(cut.glob("*.safetensors"))) > 1
    whole, batch = warm_state(model), make_batch()
    configs = rank_configs(cut, make_plan("tp2.pp2.fs1"))
    outcomes = ranks.run(update, [(config, None, batch.columns(), []) for config in configs])
    found = assemble([state for _, state, _ in outcomes], whole)
    assert all((found[name][0] == arrays[0]).all() for name, arrays in whole.items())
    assert all((found[name][1] == 0).all() for name in whole)


def try_to_load(config: TrainingRankConfig) -> NereusError | None:
    return _error_of(lambda: update(config, None, {}, []))


def test_a_folder_that_lacks_a_tensor_or_a_file_is_named(model: Path, tmp_path: Path, ranks: RankProcesses) -> None:
    from safetensors.numpy import load_file, save_file

    for folder in ("no-file", "no-tensor", "other-shape"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "no-tensor" / "model.safetensors")
    save_file({**tensors, "model.norm.weight": norm[:5]}, tmp_path / "other-shape" / "model.safetensors")
    expected = {"no-file": "model.safetensors does not exist", "no-tensor": "model.norm.weight", "other-shape": "shape"}
    for folder, text in expected.items():
        (error,) = ranks.run(try_to_load, [(rank_configs(tmp_path / folder, make_plan("tp1.pp1.fs1"))[0],)])
        assert error is not None and text in str(error)


def copies_and_digest(config: TrainingRankConfig) -> tuple[dict[Any, Any], int]:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(4)
        return engine.wire_copies("bfloat16"), engine.digest("bfloat16")
    finally:
        engine.close()


def test_ranks_digest_exactly_what_they_offer_on_the_wire(model: Path, ranks: RankProcesses) -> None:
    shapes = {name: arrays[0].shape for name, arrays in warm_state(model).items()}
    for layout in ("tp1.pp1.fs1", "tp2.pp1.fs2"):
        configs = rank_configs(model, make_plan(layout))
        digests = []
        for copies, digest in ranks.run(copies_and_digest, [(config,) for config in configs]):
            assert digest == combine(
                digest_box(name, shapes[name], box, bits) for name, parts in copies.items() for box, bits in parts
            )
            digests.append(digest)
        assert len(set(digests)) == len(digests)


def test_weight_decay_leaves_norms_and_biases_alone(model: Path, ranks: RankProcesses) -> None:
    whole, batch = warm_state(model), make_batch()
    plan = make_plan("tp1.pp1.fs1")
    plain, _ = parameters_after(ranks, rank_configs(model, plan), whole, batch)
    options = TrainingOptions(Optimizer(weight_decay=0.5), threads=1)
    decayed, _ = parameters_after(ranks, rank_configs(model, plan, options), whole, batch)
    for name, (parameter, *_) in decayed.items():
        expected = plain[name][0] - (1e-3 * 0.5 * whole[name][0] if parameter.ndim > 1 else 0)
        np.testing.assert_allclose(parameter, expected, atol=1e-6)


def test_the_saved_config_is_what_the_tests_think(model: Path) -> None:
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True
