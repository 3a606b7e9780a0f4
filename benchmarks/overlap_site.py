"""A coordinator with its registry and stage services on loopback, whose units run in the processes of their devices."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nereus_coordinator.jobs import PlacedJobs
from nereus_coordinator.ledger import UnitLedger
from nereus_coordinator.placement import ModelSource, Placement
from nereus_coordinator.reach import Reach
from nereus_coordinator.transitions import Transitions
from nereus_inference.unit import InferenceUnit
from nereus_training.unit import TrainingUnit

from benchmarks.device_processes import DeviceProcesses, DeviceWorkers
from benchmarks.training_units import train_units
from nereus.v1.units_pb2_grpc import add_UnitServiceServicer_to_server
from nereus_common.core.ids import JobId, ModelStage, Stage, TransitionId
from nereus_common.core.plan import Plan
from nereus_common.registry import Device, Registry, ServiceRecord, TransitionRecord, embedded, open_registry
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.base import HostSettings, UnitHost, UnitSpec
from nereus_common.stages.servicer import UnitServicer
from nereus_common.stages.units import Units
from nereus_common.transitions.lifecycle import TransitionState

SECONDS = 60.0
"""For a transition, and for any other step. The paper's trials have 20 s, on devices of their own."""
LEASE_SECONDS = 24 * 3600.0
PAUSE = 0.1
"""Seconds by which ranks start at random after each other."""

State = Mapping[ModelStage, tuple[int, Mapping[str, int]]]
"""Version and digests by kind of what each model-stage holds."""


@dataclass(slots=True)
class Site:
    model: Path
    batch: RolloutBatch
    registry: Registry
    table: Units
    jobs: PlacedJobs
    transitions: Transitions

    async def place(self, job: JobId, plan: Plan) -> int:
        """Place a job, and make one update of what it trains; returns the version it is at then."""
        models = {name.model: ModelSource(name.model, str(self.model)) for name in plan.names}
        await self.jobs.place(Placement(job, 1, plan, models, 0), SECONDS)
        trained = [name for name in plan.names if name.stage is Stage.TRAINING]
        for name in trained:
            specs = [entry.spec for entry in self.table.entries() if entry.spec.job == job]
            await train_units(self.table, [spec for spec in specs if spec.model_stage == name], self.batch, 0)
        return 1 if trained else 0

    async def move(self, job: JobId, target: Plan, version: int, attempt: int = 0) -> TransitionRecord:
        """One transition of the job, from its record to its end. Raises what planning, preparing and running raise."""
        epoch = self.jobs.get(job).placement.epoch
        old = self.jobs.get(job).placement.plan
        record = TransitionRecord(TransitionId(f"{job}.t{attempt}"), job, epoch, old, target, created=time.time())
        await self.registry.put_transition(record, expected=0)
        await self.transitions.prepare(job, record.id, epoch, target, SECONDS)
        await self.transitions.run(job, record.id, epoch, version, SECONDS)
        await self.transitions.finished(job)
        return (await self.registry.get_transition(job, record.id)).value

    async def state(self, job: JobId) -> State:
        names = self.jobs.get(job).placement.plan.names
        return {name: await self.transitions.digest(job, name, SECONDS) for name in names}

    async def reached(self, job: JobId, target: Plan, record: TransitionRecord) -> bool:
        """Whether the job is under `target` with all its units, its grants are on that plan's devices, and on no
        others, and no byte was moved in vain."""
        placed = self.jobs.get(job)
        units = sorted((unit.unit.model_stage, unit.unit.replica) for unit in placed.units)
        wanted = sorted((name, replica) for name, stage in target.stages for replica in range(stage.replicas))
        mine = {unit.id for unit in placed.units}
        granted = [grant.device for grant in await self.registry.grants() if grant.unit in mine]
        return (
            record.state is TransitionState.DONE
            and placed.placement.plan == target
            and units == wanted
            and sorted(granted) == sorted(target.devices)
            and record.bytes_moved == record.bytes_needed
        )

    async def release(self, jobs: Sequence[JobId]) -> None:
        for job in jobs:
            await self.transitions.forget(job)
            await self.jobs.release(job)


@asynccontextmanager
async def site(
    model: Path, batch: RolloutBatch, devices: Sequence[Device], folder: Path, seed: int
) -> AsyncIterator[Site]:
    """Everything is gone afterwards."""
    processes = DeviceProcesses([device.id for device in devices], folder / "logs", random.Random(seed), PAUSE)
    server = embedded.start(folder / "registry")
    try:
        await processes.start()
        async with await open_registry(server.url) as registry, Channels() as channels:
            for device in devices:
                await registry.put_device(device)
            table = Units(lambda spec: _host(spec, folder / "logs", processes))
            async with _serving(table, registry, devices[0].node):
                ledger, reach = UnitLedger(registry), Reach(registry, channels)
                ledger.lead(await registry.acquire_lease("coordinator", "overlap", LEASE_SECONDS))
                jobs = PlacedJobs(ledger, reach)
                jobs.open()
                yield Site(model, batch, registry, table, jobs, Transitions(jobs, ledger, reach))
    finally:
        await processes.stop()
        embedded.stop(server.data_dir)


@asynccontextmanager
async def _serving(table: Units, registry: Registry, node: str) -> AsyncIterator[None]:
    """One server for the units of both stages, known as a service of each."""
    server = RpcServer("overlap")
    server.add(add_UnitServiceServicer_to_server, UnitServicer(table))
    await server.start()
    try:
        for stage in (Stage.TRAINING, Stage.INFERENCE):
            await registry.announce_service(
                ServiceRecord(str(stage), str(stage), server.target, node), str(stage), LEASE_SECONDS
            )
        yield
    finally:
        await table.release_all()
        await server.stop(1.0)


def _host(spec: UnitSpec, logs: Path, processes: DeviceProcesses) -> UnitHost:
    """A unit as its stage service makes it, but for whose processes its ranks are in."""
    kind = TrainingUnit if spec.model_stage.stage is Stage.TRAINING else InferenceUnit
    unit = kind(spec, HostSettings(logs), lambda lost: None)
    ranks = dict(zip(spec.plan.unit_devices(spec.replica), unit._workers.specs, strict=True))
    unit._workers = DeviceWorkers(processes, ranks)
    made: UnitHost = unit
    return made
