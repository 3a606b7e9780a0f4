"""The jobs this coordinator has placed, and what it does to them: place, sync, release."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nereus_common.core.emu import Event, Unit, step
from nereus_common.core.errors import Conflict, NereusError, NotFound, ResourceExhausted, StaleEpoch, Unavailable
from nereus_common.core.ids import JobId, ModelStage, Stage
from nereus_common.registry import Registry
from nereus_common.rpc.health import serves
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.together import together
from nereus_common.stages.base import Rendezvous, UnitSpec, new_unit

from .placement import Placement, loads_from_folder, needed_bytes, synced_models, unit_specs
from .remote_unit import RemoteUnit
from .sync import SyncReport, WeightSync

log = logging.getLogger(__name__)

GRANT_PHASE = "run"
"""Units stay resident on their devices, so one grant covers all their phases."""
RELEASE_SECONDS = 30.0


@dataclass(slots=True)
class PlacedJob:
    """All units of a job, and how its trained models reach the others."""

    placement: Placement
    units: Sequence[RemoteUnit]
    syncs: Mapping[str, WeightSync]
    reports: Sequence[SyncReport] = ()
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class PlacedJobs:
    """Acts only as the leader: writes carry the fence of its lease, and the registry refuses older ones."""

    def __init__(self, registry: Registry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels
        self._fence: int | None = None
        self._jobs: dict[JobId, PlacedJob] = {}
        self._placing: dict[JobId, asyncio.Lock] = {}

    def lead(self, fence: int) -> None:
        """This coordinator holds the lease; `fence` is the lease's."""
        self._fence = fence

    async def place(self, placement: Placement, timeout: float) -> PlacedJob:
        """Idempotent by (job, epoch). When anything fails, nothing of the job is left."""
        if self._fence is None:
            raise Unavailable("this coordinator does not hold the lease yet", remedy="try again", job=placement.job)
        async with self._placing.setdefault(placement.job, asyncio.Lock()):
            placed = self._jobs.get(placement.job)
            if placed is not None:
                self._check_same(placed.placement, placement)
                return placed
            try:
                async with asyncio.timeout(timeout):
                    placed = await self._place(placement, timeout)
            except BaseException:
                await asyncio.shield(self.release(placement.job))
                raise
            self._jobs[placement.job] = placed
            return placed

    async def sync(self, job: JobId, epoch: int, model: str, version: int, timeout: float) -> SyncReport:
        placed = self._jobs.get(job)
        if placed is None:
            raise NotFound(f"job {job} is not placed here", remedy="place it first", job=job)
        if epoch != placed.placement.epoch:
            raise StaleEpoch(f"job {job} is at epoch {placed.placement.epoch}, the call is of {epoch}", job=job)
        weight_sync = placed.syncs.get(model)
        if weight_sync is None:
            return SyncReport(model, version, 0, 0, 0.0, {})
        async with placed.busy:
            report = await weight_sync.run(version, timeout, f"{job}.e{epoch}.sync.{model}.v{version}")
            await self._record_version(weight_sync.receivers, version)
            return report

    async def release(self, job: JobId) -> None:
        """Release every unit the registry knows of the job, then its grants. A dead service holds nothing up."""
        self._jobs.pop(job, None)
        services = {status.service.name: status for status in await self._registry.services()}
        targets = {status.service.target for status in services.values() if status.alive}
        known = await self._registry.units(job)
        await asyncio.gather(*(self._release_unit(unit.value, targets) for unit in known))
        for unit in known:
            await self._registry.release_grants(unit.value.id)
            try:
                await self._registry.remove_unit(job, unit.value.id, expected=unit.revision, fence=self._fence)
            except Conflict:
                log.warning("unit %s changed while it was released", unit.value.id)

    async def _release_unit(self, unit: Unit, targets: Iterable[str]) -> None:
        for target in targets:
            remote = RemoteUnit(unit, target, self._channels.get(target))
            try:
                await remote.release(RELEASE_SECONDS)
            except NereusError as error:
                log.warning("unit %s at %s was not released: %s", unit.id, target, error)

    async def _place(self, placement: Placement, timeout: float) -> PlacedJob:
        needed = await needed_bytes(placement)
        targets = await self._targets(placement)
        specs = unit_specs(placement, _meeting_point)
        for spec in specs:
            await self._grant(spec, needed)
        units = [self._remote(spec, targets) for spec in specs]
        await together(unit.prepare(spec, timeout) for unit, spec in zip(units, specs, strict=True))
        await self._advance(units, Event.PREPARED)
        loaded = [unit for unit in units if loads_from_folder(placement.plan, unit.unit.model_stage)]
        await together(self._load(unit, placement, timeout) for unit in loaded)
        syncs = {model: _sync_of(model, units, placement) for model in synced_models(placement.plan)}
        version, transition = placement.version, f"{placement.job}.e{placement.epoch}.place"
        reports = [await one.run(version, timeout, transition) for one in syncs.values()]
        await self._advance(units, Event.LOAD_STARTED, Event.LOADED)
        await self._advance(units, Event.COMMITTED, version=version)
        epoch = await self._registry.commit_plan(placement.job, placement.epoch - 1, placement.plan, fence=self._fence)
        log.info("job %s placed at epoch %d: plan %s", placement.job, epoch, placement.plan.id)
        return PlacedJob(placement, units, syncs, reports)

    async def _grant(self, spec: UnitSpec, needed: Mapping[tuple[ModelStage, int, int], int]) -> None:
        """Record the unit, then take its bytes on every device: what is recorded can always be released."""
        await self._registry.put_unit(new_unit(spec), expected=0, fence=self._fence)
        devices = spec.plan.unit_devices(spec.replica)
        wanted = {device: needed[spec.model_stage, spec.replica, rank] for rank, device in enumerate(devices)}
        await self._registry.grant(spec.unit, GRANT_PHASE, wanted)

    async def _targets(self, placement: Placement) -> Mapping[tuple[Stage, str], str]:
        """(stage, node) → gRPC target of its service, of those that answer; checks that every device exists."""
        known = {device.id for device in await self._registry.devices()}
        missing = [str(device) for device in placement.plan.devices if device not in known]
        if missing:
            raise ResourceExhausted(
                f"job {placement.job}: the plan uses {', '.join(missing)}; the pool has "
                f"{', '.join(str(device) for device in sorted(known)) or 'no device'}",
                remedy="change the plan's devices or add devices to the cluster",
                field="plan.devices",
            )
        alive = [
            status.service
            for status in await self._registry.services()
            if status.alive and status.service.role in list(Stage)
        ]
        answers = await asyncio.gather(*(serves(self._channels.get(service.target)) for service in alive))
        return {
            (Stage(service.role), service.node): service.target
            for service, answered in zip(alive, answers, strict=True)
            if answered
        }

    def _remote(self, spec: UnitSpec, targets: Mapping[tuple[Stage, str], str]) -> RemoteUnit:
        stage, node = spec.model_stage.stage, _node_of(spec)
        target = targets.get((stage, node))
        if target is None:
            raise Unavailable(
                f"no {stage} service is alive on node {node}", remedy="start it, or see `nereus status`", unit=spec.unit
            )
        return RemoteUnit(new_unit(spec), target, self._channels.get(target))

    async def _load(self, unit: RemoteUnit, placement: Placement, timeout: float) -> None:
        trains = unit.unit.model_stage.stage is Stage.TRAINING
        await unit.load(placement.version, timeout, placement.checkpoint if trains else "")
        await unit.commit(placement.version, timeout)

    async def _advance(self, units: Iterable[RemoteUnit], *events: Event, version: int | None = None) -> None:
        """Record what happened to units that went through it."""
        for unit in units:
            stored = await self._registry.get_unit(unit.unit.job, unit.id)
            value = stored.value
            for event in events:
                value = step(value, event, epoch=unit.unit.epoch, version=version)
            await self._registry.put_unit(value, expected=stored.revision, fence=self._fence)

    async def _record_version(self, units: Iterable[RemoteUnit], version: int) -> None:
        for unit in units:
            stored = await self._registry.get_unit(unit.unit.job, unit.id)
            value = step(stored.value, Event.UPDATE_STARTED, epoch=unit.unit.epoch)
            value = step(value, Event.UPDATED, epoch=unit.unit.epoch)
            value = step(value, Event.COMMITTED, epoch=unit.unit.epoch, version=version)
            await self._registry.put_unit(value, expected=stored.revision, fence=self._fence)

    @staticmethod
    def _check_same(placed: Placement, asked: Placement) -> None:
        if placed != asked:
            raise Conflict(
                f"job {asked.job} is placed at epoch {placed.epoch} with plan {placed.plan.id}",
                remedy="release it first",
                job=asked.job,
            )


def _sync_of(model: str, units: Sequence[RemoteUnit], placement: Placement) -> WeightSync:
    mine = [unit for unit in units if unit.unit.model_stage.model == model]
    trained = ModelStage(model, Stage.TRAINING)
    return WeightSync(
        model=model,
        wire_dtype=placement.plan[trained].dtypes.compute,
        sources=[unit for unit in mine if unit.unit.model_stage == trained],
        receivers=[unit for unit in mine if unit.unit.model_stage != trained],
    )


def _node_of(spec: UnitSpec) -> str:
    nodes = sorted({device.node for device in spec.plan.unit_devices(spec.replica)})
    if len(nodes) > 1:
        raise ResourceExhausted(
            f"unit {spec.unit} spans the nodes {', '.join(nodes)}",
            remedy="keep the ranks of one unit on one node; replicas may be on different ones",
            field="plan.devices",
        )
    return nodes[0]


def _meeting_point(prefix: str) -> Rendezvous:
    """A free port of this host's loopback: rank 0 listens there as soon as it starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Rendezvous("127.0.0.1", port, prefix)
