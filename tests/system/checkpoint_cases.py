"""Saving and restoring training state in rank processes, without services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.index import RankFile, check_coverage, merge, write_index
from nereus_common.checkpoints.manifest import Manifest, ModelEntry
from nereus_common.checkpoints.rank_file import write_rank_file
from nereus_common.checkpoints.state import Digests
from nereus_common.core.ids import TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.engines.torch_model.limits import read_config
from nereus_common.engines.training.base import TensorState, TrainingRankConfig, TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.state.architecture import ModelShape
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import rank_configs, shares, step_spec

Columns = Mapping[str, NDArray[Any]]
States = list[dict[TensorName, TensorState]]
UPDATES = 2
"""Updates before a checkpoint is made."""


def save_and_go_on(
    config: TrainingRankConfig, columns: Columns, specs: Sequence[TrainStepSpec], folder: str
) -> tuple[str, dict[TensorName, TensorState]]:
    """In a rank process: all updates but the last, this rank's file in `folder` ("": none), then the last update."""
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        engine.load(0)
        for spec in specs[:-1]:
            engine.train_step(spec, columns)
        states = tuple(engine.snapshot(len(specs) - 1))
        engine.train_step(specs[-1], columns)
        written = write_rank_file(Path(folder), config.rank, states).to_json() if folder else ""
        return written, engine.state()
    finally:
        engine.close()


def restore_and_go_on(
    config: TrainingRankConfig, columns: Columns, spec: TrainStepSpec, folder: str
) -> tuple[Digests, set[int], dict[TensorName, TensorState]]:
    """In a rank process: digests of what it owns, update counters of what it holds, and its state one update later."""
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        digests = engine.restore(spec.step, Path(folder), "actor")
        counters = {held.step for held in engine.state().values()}
        engine.train_step(spec, columns)
        return digests, counters, engine.state()
    finally:
        engine.close()


def save(ranks: RankProcesses, model: Path, plan: StagePlan, batch: RolloutBatch, root: Path) -> tuple[Path, States]:
    """A checkpoint after UPDATES updates under `plan`, and the state of all ranks one update later."""
    specs = [step_spec(batch, step) for step in range(UPDATES + 1)]
    partial = folders.begin(root, UPDATES, ["actor"])
    parts = shares(batch, plan.replicas)
    outcomes = ranks.run(
        save_and_go_on,
        [
            (config, parts[config.replica].columns(), specs, "" if config.replica else str(partial / "actor"))
            for config in rank_configs(model, plan)
        ],
    )
    files = [RankFile.from_json(text, "a rank") for text, _ in outcomes if text]
    index = merge(files)
    check_coverage(index, ModelShape.from_config(read_config(str(model))))
    path, sha256 = write_index(partial / "actor", index)
    entry = ModelEntry(str(path.relative_to(partial)), sha256, Digests.sum(file.digests for file in files), 0)
    spec = {"models": {"actor": {"path": str(model)}}}
    manifest = Manifest("job", UPDATES, UPDATES, 0, 1, "2026-01-01T00:00:00+00:00", spec, {}, {"actor": entry})
    return folders.commit(partial, manifest), [state for _, state in outcomes]


def restore(
    ranks: RankProcesses, model: Path, plan: StagePlan, batch: RolloutBatch, folder: Path
) -> tuple[list[Digests], set[int], States]:
    """Per replica the digests after loading; all counters; the state of all ranks one update later."""
    parts = shares(batch, plan.replicas)
    configs = [replace(config, seed=9) for config in rank_configs(model, plan)]
    spec = step_spec(batch, UPDATES)
    outcomes = ranks.run(
        restore_and_go_on, [(config, parts[config.replica].columns(), spec, str(folder)) for config in configs]
    )
    digests = [
        Digests.sum(mine for config, (mine, *_) in zip(configs, outcomes, strict=True) if config.replica == replica)
        for replica in range(plan.replicas)
    ]
    return digests, set().union(*(counters for _, counters, _ in outcomes)), [state for *_, state in outcomes]
