"""Units of a benchmark: a stage service on loopback, its real worker processes, and the coordinator's view of them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from nereus_coordinator.placement import ModelSource, Placement, unit_specs
from nereus_coordinator.remote_unit import RemoteUnit
from nereus_generation.unit import GenerationUnit
from nereus_training.unit import TrainingUnit

from nereus.v1.units_pb2_grpc import add_UnitServiceServicer_to_server
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.engines.training.base import TrainStepSpec
from nereus_common.registry import Registry
from nereus_common.rl.assembly import Completion, Group, assemble, share_groups
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import loss_weights
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.ports import free_port
from nereus_common.rpc.server import RpcServer
from nereus_common.rpc.together import together
from nereus_common.stages.base import HostSettings, Rendezvous, UnitHost, UnitSpec, new_unit
from nereus_common.stages.servicer import UnitServicer
from nereus_common.stages.units import Units

JOB = JobId("bench-reshard")
ACTOR = ModelStage("actor", Stage.TRAINING)
SAMPLER = ModelStage("actor", Stage.GENERATION)
SECONDS = 600.0
PROMPTS, SAMPLES, TOKENS = 4, 2, 16
"""Of the batch that is trained on: enough for moments that are not zero."""


@dataclass
class Side:
    """All units of one model-stage in one epoch, and their specs."""

    table: Units
    units: Sequence[RemoteUnit]
    specs: Sequence[UnitSpec]
    plan: Plan
    version: int = 0

    @property
    def pids(self) -> dict[DeviceId, int]:
        """The process of each rank by its device."""
        hosts = {entry.spec.unit: entry.host for entry in self.table.entries()}
        return {
            device: pid
            for spec in self.specs
            for device, pid in zip(spec.plan.unit_devices(spec.replica), hosts[spec.unit].pids, strict=True)
        }

    async def prepare(self) -> None:
        await together(unit.prepare(spec, SECONDS) for unit, spec in zip(self.units, self.specs, strict=True))

    async def load(self) -> None:
        """Version 0 from the model folder."""
        await together(unit.load(0, SECONDS) for unit in self.units)
        await together(unit.commit(0, SECONDS) for unit in self.units)

    async def commit(self, version: int, wire_dtype: str) -> None:
        """Serve what was pulled."""
        await together(unit.verify(version, wire_dtype, {}, SECONDS) for unit in self.units)
        await together(unit.commit(version, SECONDS) for unit in self.units)
        self.version = version

    async def train(self, batch: RolloutBatch) -> None:
        """One update on all units."""
        await train_units(self.table, self.specs, batch, self.version)
        self.version += 1

    async def release(self) -> None:
        await together(unit.release(SECONDS) for unit in self.units)


@dataclass
class Bench:
    """The service with its units; every `side` is of the next epoch."""

    model: Path
    table: Units
    target: str
    channels: Channels
    registry: Registry
    plans: int = 0
    """Committed ones."""
    epochs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def side(self, name: ModelStage, stage: StagePlan, engine: str = "") -> Side:
        source = ModelSource(name.model, str(self.model), engines={name.stage: engine})
        placement = Placement(JOB, next(self.epochs), Plan(((name, stage),)), {name.model: source}, 0)
        specs = unit_specs(placement, lambda prefix: Rendezvous("127.0.0.1", free_port(), prefix))
        channel = self.channels.get(self.target)
        return Side(
            self.table, [RemoteUnit(new_unit(spec), self.target, channel) for spec in specs], specs, placement.plan
        )

    def training(self, layout: str) -> Side:
        return self.side(ACTOR, plan_of(layout))


@asynccontextmanager
async def bench(model: Path, logs: Path, registry: Registry) -> AsyncIterator[Bench]:
    """The service; its units are gone afterwards."""
    settings = HostSettings(logs)

    def make(spec: UnitSpec) -> UnitHost:
        kind = TrainingUnit if spec.model_stage.stage is Stage.TRAINING else GenerationUnit
        made: UnitHost = kind(spec, settings, lambda lost: table.note_loss(spec.unit, lost))
        return made

    table = Units(make)
    server = RpcServer("bench")
    server.add(add_UnitServiceServicer_to_server, UnitServicer(table))
    async with Channels() as channels:
        await server.start()
        try:
            yield Bench(model, table, server.target, channels, registry)
        finally:
            await table.release_all()
            await server.stop(1.0)


async def train_units(table: Units, specs: Sequence[UnitSpec], batch: RolloutBatch, step: int) -> None:
    """One update, from version `step`, on all units of a model-stage."""
    hosts = {entry.spec.unit: entry.host for entry in table.entries()}
    update = _update(batch, step)
    async with asyncio.TaskGroup() as group:
        for spec, share in zip(specs, share_groups(batch, len(specs)), strict=True):
            host = hosts[spec.unit]
            assert isinstance(host, TrainingUnit)
            columns = batch.select_groups(share).columns()
            group.create_task(host.train(update, columns, pin_timeout=SECONDS / 2, timeout=SECONDS))


def plan_of(text: str) -> StagePlan:
    """`tp2.pp1.fs1 x2` on the first devices of one node, otherwise as a job has it by default."""
    layout, replicas = parse_replicated(text)
    return StagePlan(
        layout, tuple(DeviceId("node0", f"cpu{slot}") for slot in range(layout.ranks * replicas)), replicas
    )


def vocabulary_of(model: Path) -> int:
    """Tokens that the model in this folder knows."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def random_batch(vocabulary: int) -> RolloutBatch:
    """Prompts and responses of random tokens with random advantages; always the same."""
    rng = np.random.default_rng(7)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, vocabulary, count))

    groups = [
        Group(
            position,
            tokens(TOKENS),
            tuple(Completion(tokens(TOKENS), (-4.0,) * TOKENS, (0,) * TOKENS, finished=True) for _ in range(SAMPLES)),
        )
        for position in range(PROMPTS)
    ]
    batch = assemble(groups)
    return batch.with_columns(
        rewards=np.zeros(batch.sequences, np.float32),
        advantages=rng.standard_normal(len(batch.response_tokens)).astype(np.float32),
        weights=loss_weights(batch, 1, "token", longest=TOKENS),
    )


def _update(batch: RolloutBatch, step: int) -> TrainStepSpec:
    loss = {"name": "policy", "tis_cap": 2.0}
    return TrainStepSpec(step, loss, learning_rate=1e-5, max_grad_norm=1.0, minibatch_tokens=(batch.loss_tokens,))
