"""Inference units of a model that nobody trains, whose ranks are pooled processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from nereus_inference.unit import BODY, InferenceUnit
from numpy.typing import NDArray

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.core.workflow import Work
from nereus_common.engines import options
from nereus_common.engines.inference.base import InferenceOptions, InferenceRankConfig
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.stages.base import HostSettings, UnitSpec
from tests.system.moves import SECONDS, Group, PooledWorkers
from tests.system.rank_processes import RankProcesses

REFERENCE = ModelStage("reference", Stage.INFERENCE)


class PooledScorer(InferenceUnit):
    """Units of inference do not know each other: each meets under a prefix of its own."""

    def __init__(self, spec: UnitSpec, pool: RankProcesses, first: int) -> None:
        super().__init__(spec, HostSettings(Path("/unused")), lambda lost: None)
        meeting = options.Rendezvous(spec.rendezvous.host, spec.rendezvous.port + spec.replica, spec.unit)
        config = InferenceRankConfig(
            spec.unit,
            spec.model_path,
            spec.plan,
            0,
            meeting,
            InferenceOptions(threads=1),
            transport="ucx",
            collective_timeout=SECONDS,
            replica=spec.replica,
        )
        configs = [replace(config, rank=rank) for rank in range(spec.plan.layout.ranks)]
        self._workers = PooledWorkers(pool, first, BODY, configs)  # type: ignore[assignment]


class Scorers(Group):
    stage: ClassVar[ModelStage] = REFERENCE
    dtype: ClassVar[str] = "bfloat16"
    kind = PooledScorer

    async def scores(self, batch: RolloutBatch) -> list[NDArray[np.float32]]:
        """[R] what each unit says of the whole batch."""
        found = []
        for unit in self.units:
            async with self.table.working(unit.id, unit.spec.epoch) as entry:
                assert isinstance(entry.host, PooledScorer)
                found.append((await entry.host.score(batch.columns(), Work.LOGPROBS, 1.0, SECONDS))["logprobs"])
        return found

    async def digests(self, version: int) -> list[int]:
        found = await asyncio.gather(*(unit.digest(version, SECONDS) for unit in self.units))
        assert {tuple(one) for one in found} == {("parameters",)}
        return [one["parameters"] for one in found]
