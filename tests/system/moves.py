"""Training units whose ranks are pooled processes, for tests that move states between many layouts."""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nereus_coordinator.moving import MoveReport, move_state
from nereus_training.unit import BODY, TrainingUnit

from nereus_common.core.ids import JobId, ModelStage, Stage, TensorName, UnitId
from nereus_common.core.layout import parse_replicated
from nereus_common.engines import options
from nereus_common.engines.training.base import TrainingOptions, TrainingRankConfig, TrainStepResult
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rpc.ports import free_port
from nereus_common.stages.base import Holding, HostSettings, PullOrder, RankPulled, Rendezvous, UnitHost, UnitSpec
from nereus_common.stages.units import Units
from nereus_common.transitions.dag import Mode
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import make_batch, make_plan, shares, step_spec

ACTOR = ModelStage("actor", Stage.TRAINING)
SECONDS = 240.0
"""For any step, also on a machine that does much else."""
BUCKET_BYTES = 16 << 10
"""A few tensors of a tiny model: an in-place move takes many rounds."""


class _Rank:
    """In a rank process: the worker that stays between calls."""

    worker: Any = None


def open_rank(body: str, config: Any) -> None:
    module, _, name = body.partition(":")
    _Rank.worker = getattr(importlib.import_module(module), name)(config)


def call_rank(method: str, *given: Any) -> Any:
    return getattr(_Rank.worker, method)(*given)


def close_rank() -> None:
    worker, _Rank.worker = _Rank.worker, None
    if worker is not None:
        worker.close()


class PooledWorkers:
    """A WorkerSet's calls, answered by processes `first`, `first` + 1 … of a pool; they outlive the unit."""

    def __init__(self, pool: RankProcesses, first: int, body: str, configs: Sequence[Any]) -> None:
        self._pool, self._first, self._body, self._configs = pool, first, body, configs
        self._open = False

    @property
    def pids(self) -> Sequence[int]:
        return self._pool.pids[self._first : self._first + len(self._configs)]

    async def start(self, timeout: float) -> None:
        self._open = True
        await self._run(open_rank, [(self._body, config) for config in self._configs], timeout)

    async def call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        return await self._run(call_rank, [(method, *given) for given in arguments], timeout)

    async def call_each(self, method: str, *given: Any, timeout: float) -> list[Any]:
        return await self.call_all(method, [given] * len(self._configs), timeout)

    async def stop(self) -> None:
        if self._open:
            self._open = False
            await self._run(close_rank, [()] * len(self._configs), SECONDS)

    async def _run(self, function: Any, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        return await asyncio.to_thread(self._pool.run, function, arguments, timeout, self._first)


class PooledUnit(TrainingUnit):
    def __init__(self, spec: UnitSpec, pool: RankProcesses, first: int) -> None:
        super().__init__(spec, HostSettings(Path("/unused")), lambda lost: None)
        meeting = spec.rendezvous
        configs = [
            TrainingRankConfig(
                spec.unit,
                spec.model_path,
                spec.plan,
                spec.replica,
                rank,
                options.Rendezvous(meeting.host, meeting.port, meeting.prefix),
                TrainingOptions(threads=1),
                transport="ucx",
                collective_timeout=SECONDS,
            )
            for rank in range(spec.plan.layout.ranks)
        ]
        self._workers = PooledWorkers(pool, first, BODY, configs)  # type: ignore[assignment]


@dataclass(frozen=True)
class LocalUnit:
    """A unit of a stage service's table, without the wire between."""

    units: Units
    spec: UnitSpec

    @property
    def id(self) -> UnitId:
        return self.spec.unit

    @property
    def host(self) -> TrainingUnit:
        (found,) = [entry.host for entry in self.units.entries() if entry.spec is self.spec]
        assert isinstance(found, TrainingUnit)
        return found

    async def offer(self, version: int, timeout: float) -> Holding:
        return await self.units.offer(self.id, self.spec.epoch, version, timeout)

    async def withdraw(self, timeout: float) -> None:
        await self.units.withdraw(self.id, self.spec.epoch, timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        return await self.units.describe(self.id, self.spec.epoch, timeout, state)

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        return await self.units.pull(self.id, self.spec.epoch, order)

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        await self.units.drop(self.id, self.spec.epoch, tensors, timeout)

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        return await self.units.digest(self.id, self.spec.epoch, version, timeout)

    async def commit(self, version: int) -> None:
        dtype = self.spec.plan.dtypes.compute
        await self.units.verify(self.id, self.spec.epoch, version, dtype, {}, SECONDS)
        await self.units.commit(self.id, self.spec.epoch, version, SECONDS)

    async def release(self) -> None:
        await self.units.release(self.id, self.spec.epoch)


class Group:
    """All units of a layout, on `pool`'s processes from `first` on. `text`: as "tp2.pp1.fs1 x2"."""

    stage: ClassVar[ModelStage] = ACTOR
    dtype: ClassVar[str] = "float32"
    kind: ClassVar[Callable[[UnitSpec, RankProcesses, int], UnitHost]] = PooledUnit

    def __init__(self, pool: RankProcesses, model: Path, text: str, first: int, epoch: int) -> None:
        plan = make_plan(text, self.dtype)
        meeting = Rendezvous("127.0.0.1", free_port(), f"e{epoch}")
        ranks = plan.layout.ranks
        places: dict[UnitId, int] = {}
        self.table = Units(lambda spec: self.kind(spec, pool, places[spec.unit]))
        self.units: list[LocalUnit] = []
        for replica in range(plan.replicas):
            unit = UnitId(f"moved.{self.stage.model}.{self.stage.stage}.e{epoch}.r{replica}")
            places[unit] = first + replica * ranks
            spec = UnitSpec(unit, JobId("moved"), self.stage, replica, epoch, str(model), plan, "", {}, meeting, 0)
            self.units.append(LocalUnit(self.table, spec))

    async def prepare(self) -> None:
        await asyncio.gather(*(self.table.prepare(unit.spec, SECONDS) for unit in self.units))

    async def load(self) -> None:
        await asyncio.gather(*(self.table.load(unit.id, unit.spec.epoch, 0, SECONDS) for unit in self.units))
        await self.commit(0)

    async def commit(self, version: int) -> None:
        await asyncio.gather(*(unit.commit(version) for unit in self.units))

    async def train(self, step: int, batch: RolloutBatch | None = None) -> TrainStepResult:
        whole = batch or make_batch()
        spec = step_spec(whole, step)
        results = await asyncio.gather(
            *(
                unit.host.train(spec, share.columns(), pin_timeout=5.0, timeout=SECONDS)
                for unit, share in zip(self.units, shares(whole, len(self.units)), strict=True)
            )
        )
        return results[0]

    async def release(self) -> None:
        await self.table.release_all()


async def move(old: Group, new: Group, version: int, mode: Mode, bucket_bytes: int = BUCKET_BYTES) -> MoveReport:
    noted: list[int] = []

    async def note(number: int) -> None:
        noted.append(number)

    report = await move_state(
        old.units,
        new.units,
        version,
        mode=mode,
        transition="t1",
        timeout=SECONDS,
        after_round=note,
        bucket_bytes=bucket_bytes,
        wire_dtype=old.dtype,
    )
    assert noted == list(range(report.rounds))
    return report


def ranks_of(text: str) -> int:
    layout, replicas = parse_replicated(text)
    return layout.ranks * replicas


def walk(seed: int, layouts: Sequence[str], hops: int, capacity: int) -> list[str]:
    """A seeded path of `hops` different pairs through layouts that fit beside each other on `capacity` processes."""
    chance = random.Random(seed)
    path, seen = ["tp1.pp1.fs1"], set[tuple[str, str]]()
    while len(path) <= hops:
        room = capacity - ranks_of(path[-1])
        fits = [one for one in layouts if ranks_of(one) <= room and one != path[-1] and (path[-1], one) not in seen]
        if not fits:
            break
        chosen = chance.choice(fits)
        seen.add((path[-1], chosen))
        path.append(chosen)
    return path
