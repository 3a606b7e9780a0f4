"""Scores are the model's log-probs in every layout, and weights arrive from a trainer over UCX."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nereus_common.core.errors import NereusError, NotFound, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import RankRef
from nereus_common.engines.inference.base import InferenceOptions, InferenceRankConfig
from nereus_common.engines.options import Rendezvous
from nereus_common.engines.torch_model.answers import RankHolding
from nereus_common.engines.training.base import TrainingRankConfig, TrainStepSpec
from nereus_common.rpc.ports import free_port
from nereus_common.transport.base import PullItem, PullRequest
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import (
    MODELS,
    make_batch,
    make_plan,
    rank_configs,
    save_model,
    step_spec,
)
from tests.system.training_reference import load_reference, reference_logprobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def inference_ranks(model: Path, plan: StagePlan, transport: str = "loopback") -> list[InferenceRankConfig]:
    meet = Rendezvous("127.0.0.1", free_port(), "score")
    options = InferenceOptions(threads=1)
    return [
        InferenceRankConfig("scorer", str(model), plan, rank, meet, options, transport, 20.0)
        for rank in range(plan.layout.ranks)
    ]


def score(config: InferenceRankConfig, columns: Mapping[str, NDArray[Any]], temperature: float) -> NDArray[np.float32]:
    from nereus_common.engines.inference.torch_native import TorchInferenceEngine

    engine = TorchInferenceEngine(config)
    try:
        engine.load(0)
        first = engine.score(columns, "logprobs", temperature)["logprobs"]
        assert (engine.score(columns, "logprobs", temperature)["logprobs"] == first).all()
        return first
    finally:
        engine.close()


@pytest.mark.parametrize("name", list(MODELS))
def test_scores_equal_the_plain_model_in_every_layout(
    name: str, folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch = make_batch()
    with torch.no_grad():
        expected = reference_logprobs(load_reference(folders[name]), batch, 0.7).numpy()
    for layout in ("tp1.pp1.fs1", "tp2.pp1.fs1", "tp1.pp1.fs3", "tp1.pp2.fs2", "tp2.pp2(1+3).fs1", "tp2.pp1.fs2"):
        configs = inference_ranks(folders[name], make_plan(layout))
        for found in ranks.run(score, [(config, batch.columns(), 0.7) for config in configs]):
            np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=layout)


class Trained:
    """In a rank process: a training worker that stays between calls."""

    worker: Any = None


def start_trainer(config: TrainingRankConfig, columns: Mapping[str, NDArray[Any]], spec: TrainStepSpec) -> RankHolding:
    from nereus_common.engines.training.worker import TrainingWorker

    Trained.worker = TrainingWorker(config)
    Trained.worker.load(0)
    Trained.worker.train_step(spec, columns)
    Trained.worker.publish(1, 5.0)
    holding: RankHolding = Trained.worker.describe()
    return holding


def stop_trainer() -> int:
    digest: int = Trained.worker.verify("bfloat16")
    Trained.worker.close()
    Trained.worker = None
    return digest


def held_rows(config: InferenceRankConfig) -> int:
    """Rows of the embedding that this rank holds, once it has filled them."""
    from nereus_common.engines.inference.torch_native import TorchInferenceEngine

    engine = TorchInferenceEngine(config)
    try:
        engine.load(0)
        (box,) = engine.boxes()[TensorName("model.embed_tokens.weight")]
        return box.shape[0]
    finally:
        engine.close()


def pull_and_serve(
    config: InferenceRankConfig, holdings: list[RankHolding], columns: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    from nereus_common.engines.inference.worker import InferenceWorker

    worker = InferenceWorker(config)
    try:
        worker.load(0, 10.0)

        def logprobs() -> NDArray[np.float32]:
            found: NDArray[np.float32] = worker.score(columns, "logprobs", 1.0)["logprobs"]
            return found

        before = logprobs()
        items = [
            PullItem(name, part, RankRef("unit0", holding.rank), holding.address)
            for name, (box,) in worker.describe().boxes.items()
            for holding in holdings
            for held in holding.boxes.get(name, ())
            if (part := box.intersect(held))
        ]
        short = PullRequest(1, tuple(items[1:]), 2, 20.0, "test", "bfloat16")
        errors = [_error_of_pull(worker, short), _error_of(lambda: worker.apply(1))]
        pulled = asyncio.run(worker.pull(PullRequest(1, tuple(items), 2, 20.0, "test", "bfloat16")))
        assert (logprobs() == before).all()
        errors.append(_error_of(lambda: worker.verify(1, "bfloat16")))
        worker.apply(1)
        return {
            "errors": errors,
            "pulled": pulled,
            "digest": worker.verify(1, "bfloat16"),
            "moved": bool((logprobs() != before).any()),
            "elements": sum(box.elements for (box,) in worker.describe().boxes.values()),
        }
    finally:
        worker.close()


def _error_of_pull(worker: Any, request: PullRequest) -> NereusError | None:
    return _error_of(lambda: asyncio.run(worker.pull(request)))


def _error_of(call: Any) -> NereusError | None:
    try:
        call()
    except NereusError as error:
        return error
    return None


def test_a_scorer_pulls_what_a_trainer_published_and_serves_it_bit_for_bit(
    folders: dict[str, Path], ranks: RankProcesses
) -> None:
    batch, folder = make_batch(), folders["llama-untied"]
    (trainer,) = rank_configs(folder, make_plan("tp1.pp1.fs1", dtype="bfloat16"), transport="ucx")
    (holding,) = ranks.run(start_trainer, [(trainer, batch.columns(), step_spec(batch, max_grad_norm=0.0))])
    configs = inference_ranks(folder, make_plan("tp2.pp1.fs1", dtype="bfloat16"), transport="ucx")
    outcomes = ranks.run(pull_and_serve, [(c, [holding], batch.columns()) for c in configs], first=1)
    for outcome in outcomes:
        assert [type(error) for error in outcome["errors"]] == [VerificationFailed, NotFound, VerificationFailed]
        assert outcome["pulled"].digest == outcome["digest"]
        assert outcome["pulled"].bytes == 2 * outcome["elements"]
        assert outcome["moved"]
    (alone,) = inference_ranks(folder, make_plan("tp1.pp1.fs1", dtype="bfloat16"), transport="ucx")
    (whole,) = ranks.run(pull_and_serve, [(alone, [holding], batch.columns())], first=1)
    (trained,) = ranks.run(stop_trainer, [()])
    assert whole["digest"] == trained


def test_a_process_that_comes_back_as_another_rank_holds_that_ranks_part(
    folders: dict[str, Path], ranks: RankProcesses
) -> None:
    plan = make_plan("tp2.pp1.fs1")
    rows = [
        ranks.run(held_rows, [(config,) for config in inference_ranks(folders["llama-untied"], plan)], first=first)
        for first in (0, 1, 2)
    ]
    assert rows[0] == rows[1] == rows[2] and rows[0][0] != rows[0][1]
