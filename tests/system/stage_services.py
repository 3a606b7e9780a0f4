"""Stage services and a coordinator in the test's own process; the units' workers are real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nereus_controller.placed import PlacedStage, PlacedUnit
from nereus_coordinator.jobs import PlacedJob, PlacedJobs
from nereus_coordinator.ledger import UnitLedger
from nereus_coordinator.placement import ModelSource, Placement, unit_specs
from nereus_coordinator.reach import Reach
from nereus_coordinator.remote_unit import RemoteUnit
from nereus_inference.unit import InferenceUnit
from nereus_training.servicer import TrainingServicer
from nereus_training.unit import TrainingUnit

from nereus.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server
from nereus.v1.units_pb2_grpc import add_UnitServiceServicer_to_server
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import Dtypes, Plan, StagePlan
from nereus_common.registry import Device, ServiceRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.ports import free_port
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.base import HostSettings, Rendezvous, UnitHost, UnitSpec, new_unit
from nereus_common.stages.service import OnLost
from nereus_common.stages.servicer import UnitServicer
from nereus_common.stages.units import Units

JOB = JobId("saved")
DEVICES = [DeviceId("node0", f"cpu{slot}") for slot in range(6)]
SECONDS = 240.0


@dataclass
class Services:
    """A training and an inference service on one node, and the coordinator that places jobs on them."""

    registry: MemoryRegistry
    channels: Channels
    jobs: PlacedJobs
    units: dict[Stage, Units] = field(default_factory=dict)
    targets: dict[Stage, str] = field(default_factory=dict)
    epoch: int = 0

    async def place(self, plan: Plan, model: Path, version: int = 0, checkpoint: Path | None = None) -> PlacedJob:
        """At the next epoch, after releasing what was there."""
        await self.jobs.release(JOB)
        self.epoch += 1
        models = {name.model: ModelSource(name.model, str(model)) for name in plan.names}
        placement = Placement(JOB, self.epoch, plan, models, 0, version, str(checkpoint or ""))
        return await self.jobs.place(placement, SECONDS)

    async def prepare_beside(self, model: Path, stage: str = "actor_training") -> RemoteUnit:
        """A prepared unit of another job, not loaded."""
        plan = plan_of(**{stage: "tp1.pp1.fs1"})
        (name,) = plan.names
        placement = Placement(JobId("beside"), 1, plan, {name.model: ModelSource(name.model, str(model))}, 0)
        (spec,) = unit_specs(placement, lambda prefix: Rendezvous("127.0.0.1", free_port(), prefix))
        target = self.targets[name.stage]
        unit = RemoteUnit(new_unit(spec), target, self.channels.get(target))
        await unit.prepare(spec, SECONDS)
        return unit

    def pids(self) -> list[int]:
        """Of the training workers, in rank order."""
        return [pid for entry in self.units[Stage.TRAINING].entries() for pid in entry.host.pids]


@asynccontextmanager
async def stage_services(logs: Path) -> AsyncIterator[Services]:
    registry = MemoryRegistry()
    for device in DEVICES:
        await registry.put_device(Device(device, "cpu", 8 << 30))
    async with Channels() as channels:
        ledger = UnitLedger(registry)
        ledger.fence = 1
        services = Services(registry, channels, PlacedJobs(ledger, Reach(registry, channels)))
        services.jobs.open()
        servers = [await _serve(stage, services, logs) for stage in (Stage.TRAINING, Stage.INFERENCE)]
        try:
            yield services
        finally:
            for units in services.units.values():
                await units.release_all()
            for server in servers:
                await server.stop(1.0)


async def _serve(stage: Stage, services: Services, logs: Path) -> RpcServer:
    settings = HostSettings(logs)
    kind = TrainingUnit if stage is Stage.TRAINING else InferenceUnit

    def losing(spec: UnitSpec) -> OnLost:
        return lambda lost: units.note_loss(spec.unit, lost)

    def make(spec: UnitSpec) -> UnitHost:
        return kind(spec, settings, losing(spec))

    units = services.units[stage] = Units(make)
    server = RpcServer(str(stage))
    server.add(add_UnitServiceServicer_to_server, UnitServicer(units))
    if stage is Stage.TRAINING:
        server.add(add_TrainingServiceServicer_to_server, TrainingServicer(units))
    await server.start()
    services.targets[stage] = server.target
    record = ServiceRecord(str(stage), str(stage), server.target, "node0", (), "")
    await services.registry.announce_service(record, str(stage), ttl=3600.0)
    return server


def plan_of(**layouts: str) -> Plan:
    """`actor_training="tp2.pp1.fs1"` …, on devices in the order given, computing in float32."""
    stages, first = [], 0
    for name, text in layouts.items():
        model, stage = name.split("_")
        layout, replicas = parse_replicated(text)
        last = first + layout.ranks * replicas
        devices = tuple(DEVICES[first:last])
        plan = StagePlan(layout, devices, replicas, dtypes=Dtypes(compute="float32", kv="float32"))
        stages.append((ModelStage(model, Stage(stage)), plan))
        first = last
    return Plan(tuple(stages))


def trained(placed: PlacedJob) -> list[PlacedStage]:
    """The training stages, as the controller sees them."""
    plan = placed.placement.plan
    return [
        PlacedStage(
            name,
            plan[name],
            tuple(
                PlacedUnit(unit.id, unit.unit.replica, unit.unit.epoch, unit.service, unit.channel)
                for unit in placed.units
                if unit.unit.model_stage == name
            ),
        )
        for name in plan.names
        if name.stage is Stage.TRAINING
    ]
