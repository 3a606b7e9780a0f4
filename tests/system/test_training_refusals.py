"""What a step refuses: on every rank alike and before anything changed; and what it says when it failed half way."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput, JobFailed, NereusError, StaleVersion
from nereus_common.core.ids import Head
from nereus_common.engines.training.base import TrainingRankConfig, TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import make_batch, make_plan, rank_configs, save_model, shares, step_spec

Step = tuple[TrainStepSpec, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Head, Path]:
    return {head: save_model("llama-tied", tmp_path_factory.mktemp(head), head=head) for head in Head}


def error_of(call: Any) -> NereusError | None:
    try:
        call()
    except NereusError as error:
        return error
    return None


def refuse(config: TrainingRankConfig, steps: list[Step]) -> list[tuple[NereusError | None, bool]]:
    """In a rank process: each step's error, and whether the state is as before."""
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        before = engine.digest("float32")
        found = []
        for spec, columns in steps:
            error = error_of(lambda spec=spec, columns=columns: engine.train_step(spec, columns))
            found.append((error, engine.version == 0 and engine.digest("float32") == before))
        return found
    finally:
        engine.close()


def columns_but(batch: RolloutBatch, **changed: Any) -> dict[str, Any]:
    """Columns with some replaced, and without those that are None."""
    columns = {**batch.columns(), **changed}
    return {name: column for name, column in columns.items() if column is not None}


def test_what_is_wrong_with_a_step_is_named_before_anything_changes(
    folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch = make_batch(minibatches=2)
    spec, columns = step_spec(batch), batch.columns()
    first, second = spec.minibatch_tokens
    holes = np.where(batch.mask, np.nan, 0).astype(np.float32)
    cases: list[tuple[TrainStepSpec, dict[str, Any], str]] = [
        (spec, columns_but(batch, weights=None), "weights"),
        (spec, columns_but(batch, weights=holes), "weights"),
        (spec, columns_but(batch, logprobs=holes), "logprobs"),
        (spec, columns_but(batch, minibatch=None), "minibatch"),
        (spec, columns_but(batch, minibatch=batch.minibatch + 1), "minibatch"),
        (spec, columns_but(batch, minibatch=batch.minibatch - 1), "minibatch"),
        (replace(spec, minibatch_tokens=(first, second - 1)), columns, "minibatch_tokens"),
        (replace(spec, minibatch_tokens=(first + 1, second - 1)), columns, "minibatch_tokens"),
        (replace(spec, minibatch_tokens=()), columns, "minibatch_tokens"),
        (replace(spec, epochs=0), columns, "epochs"),
        (replace(spec, temperature=0.0), columns, "temperature"),
        (replace(spec, loss={"name": "value"}), columns, "loss.name"),
        (replace(spec, loss={"name": "ppo"}), columns, "loss.name"),
        (replace(spec, loss={"name": "policy", "clip_low": -1}), columns, "loss.clip_low"),
        (replace(spec, loss={"name": "policy", "ratio": "group"}), columns, "loss.ratio"),
    ]
    (found,) = ranks.run(
        refuse, [(rank_configs(folders[Head.LM], make_plan("tp1.pp1.fs1"))[0], [case[:2] for case in cases])]
    )
    for (error, unchanged), (_, _, field) in zip(found, cases, strict=True):
        assert isinstance(error, InvalidInput) and error.details["field"] == field, (error, field)
        assert unchanged


def test_a_critic_takes_the_value_loss_and_its_columns_only(folders: dict[Head, Path], ranks: RankProcesses) -> None:
    batch = make_batch()
    spec = step_spec(batch, loss={"name": "value"})
    none = np.empty(0, np.float32)
    nan = np.full_like(batch.advantages, np.nan)
    steps = [
        (step_spec(batch), batch.columns()),
        (spec, columns_but(batch, returns=none)),
        (spec, columns_but(batch, values=nan)),
        (replace(spec, temperature=0.0), columns_but(batch, advantages=nan, logprobs=nan)),
    ]
    config = rank_configs(folders[Head.SCORE], make_plan("tp1.pp1.fs1"), head=Head.SCORE)[0]
    (found,) = ranks.run(refuse, [(config, steps)])
    assert [error.details["field"] for error, _ in found if error] == ["loss.name", "returns", "values"]
    assert found[-1] == (None, False), "what a value loss does not read may hold anything"


@pytest.mark.parametrize("layout", ["tp1.pp1.fs1 x2", "tp2.pp1.fs1 x2"])
def test_what_one_unit_refuses_all_refuse_without_waiting(
    layout: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch, plan = make_batch(), make_plan(layout)
    spec = step_spec(batch)
    mine, theirs = (part.columns() for part in shares(batch, 2))
    bad = {**theirs, "advantages": np.full_like(theirs["advantages"], np.nan)}
    given = {
        0: [(spec, mine), (spec, mine), (spec, mine)],
        1: [(spec, bad), (replace(spec, learning_rate=0.5), theirs), (spec, theirs)],
    }
    configs = rank_configs(folders[Head.LM], plan)
    started = time.monotonic()
    outcomes = ranks.run(refuse, [(config, given[config.replica]) for config in configs], timeout=60)
    assert time.monotonic() - started < configs[0].collective_timeout
    for refused, told_apart, fine in outcomes:
        assert isinstance(refused[0], InvalidInput) and refused[0].details["field"] == "advantages"
        assert isinstance(told_apart[0], InvalidInput) and told_apart[0].details["field"] == "header"
        assert refused[1] and told_apart[1]
        assert fine == (None, False)


def fail_half_way(config: TrainingRankConfig, bad: Step, good: Step) -> dict[str, Any]:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        failed = error_of(lambda: engine.train_step(*bad))
        calls = (lambda: engine.train_step(*good), engine.state, lambda: engine.digest("float32"))
        after = [error_of(call) for call in (*calls, lambda: engine.wire_copies("float32"))]
        version = engine.version
        engine.load(0)
        again = engine.train_step(*good)
        digest = engine.digest("float32")
        engine.load(0)
        return {
            "failed": failed,
            "after": after,
            "version": version,
            "same": again.metrics == engine.train_step(*good).metrics and engine.digest("float32") == digest,
        }
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["tp1.pp1.fs2", "tp1.pp2.fs1 x2"])
def test_a_state_after_some_of_the_updates_is_never_used(
    layout: str, folders: dict[Head, Path], ranks: RankProcesses
) -> None:
    batch = make_batch(minibatches=2)
    far = np.where(np.repeat(batch.minibatch[batch.group], batch.response_lengths) == 1, 1e4, -4.0)
    bad = batch.with_columns(reference=far)
    loss = {"name": "policy", "kl_beta": 0.1, "kl_gradient": "plain"}
    plan = make_plan(layout)
    good_parts, bad_parts = shares(batch, plan.replicas), shares(bad, plan.replicas)
    arguments = [
        (
            config,
            (step_spec(batch, loss=loss, epochs=2), bad_parts[config.replica].columns()),
            (step_spec(batch), good_parts[config.replica].columns()),
        )
        for config in rank_configs(folders[Head.LM], plan)
    ]
    for seen in ranks.run(fail_half_way, arguments):
        assert isinstance(seen["failed"], JobFailed)
        assert "update 2 of 4 in step 0" in str(seen["failed"]) and "1 updates were made" in str(seen["failed"])
        assert [type(error) for error in seen["after"]] == [JobFailed] * 4
        assert seen["version"] == -1
        assert seen["same"]


def two_steps(config: TrainingRankConfig, spec: TrainStepSpec, columns: dict[str, Any]) -> dict[str, Any]:
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        first = engine.train_step(spec, columns)
        digest = engine.digest("float32")
        repeat = engine.train_step(spec, columns)
        unchanged = engine.digest("float32") == digest
        engine.train_step(replace(spec, step=1), columns)
        stale = error_of(lambda: engine.train_step(spec, columns))
        return {"repeated": first is repeat and unchanged, "stale": stale, "phases": set(first.seconds)}
    finally:
        engine.close()


def test_a_repeat_of_a_step_of_many_updates_makes_none(folders: dict[Head, Path], ranks: RankProcesses) -> None:
    batch = make_batch(minibatches=3)
    configs = rank_configs(folders[Head.LM], make_plan("tp1.pp2.fs1"))
    for seen in ranks.run(two_steps, [(c, step_spec(batch, epochs=2), batch.columns()) for c in configs]):
        assert seen["repeated"]
        assert isinstance(seen["stale"], StaleVersion)
        assert seen["phases"] == {"pack", "proximal", "forward_backward", "optimizer"}
