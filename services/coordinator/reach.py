"""How the coordinator reaches units: which services there are, which node a unit is on, and where its ranks meet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from nereus_common.core.emu import Unit
from nereus_common.core.errors import NereusError, ResourceExhausted, Unavailable
from nereus_common.core.ids import JobId, Stage, UnitId
from nereus_common.core.plan import Plan
from nereus_common.registry import Registry
from nereus_common.rpc.health import serves
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.ports import free_port
from nereus_common.stages.base import Rendezvous

from .remote_unit import RemoteUnit

log = logging.getLogger(__name__)

RELEASE_SECONDS = 30.0

Targets = Mapping[tuple[Stage, str], str]
"""(stage, node) → gRPC target of its service."""


class Reach:
    """Finds services through the registry and opens a channel to each once."""

    def __init__(self, registry: Registry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels

    async def check_devices(self, job: JobId, plan: Plan) -> None:
        """ResourceExhausted names the plan's devices that do not exist."""
        known = {device.id for device in await self._registry.devices()}
        missing = [str(device) for device in plan.devices if device not in known]
        if missing:
            raise ResourceExhausted(
                f"job {job}: the plan uses {', '.join(missing)}; the pool has "
                f"{', '.join(str(device) for device in sorted(known)) or 'no device'}",
                remedy="change the plan's devices or add devices to the cluster",
                field="plan.devices",
            )

    async def stage_services(self) -> Targets:
        """Those that are alive by their lease and answer."""
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

    def finds(self, unit: Unit, targets: Targets) -> bool:
        """Whether a service for the unit is alive on its node."""
        return (unit.model_stage.stage, node_of(unit)) in targets

    def unit(self, unit: Unit, targets: Targets) -> RemoteUnit:
        """Unavailable when no service for it is alive on its node."""
        stage, node = unit.model_stage.stage, node_of(unit)
        target = targets.get((stage, node))
        if target is None:
            raise Unavailable(
                f"no {stage} service is alive on node {node}", remedy="start it, or see `nereus status`", unit=unit.id
            )
        return RemoteUnit(unit, target, self._channels.get(target))

    async def release(self, units: Iterable[Unit], *, keep_copies: bool = False) -> set[UnitId]:
        """Stop the units wherever they are; a dead service holds nothing up. The units of which copies are left, where
        they are to be."""
        known = await self._registry.services()
        targets = {one.service.target for one in known if one.alive and one.service.role in list(Stage)}
        pairs = [(unit, target) for unit in units for target in targets]
        kept = await asyncio.gather(*(self._release(unit, target, keep_copies) for unit, target in pairs))
        return {unit.id for (unit, _), copies in zip(pairs, kept, strict=True) if copies}

    async def _release(self, unit: Unit, target: str, keep_copies: bool) -> bool:
        remote = RemoteUnit(unit, target, self._channels.get(target))
        try:
            return await remote.release(RELEASE_SECONDS, keep_copies=keep_copies)
        except NereusError as error:
            log.warning("unit %s at %s was not released: %s", unit.id, target, error)
            return False


def node_of(unit: Unit) -> str:
    """The node that all devices of the unit are on; ResourceExhausted when there are several."""
    nodes = sorted({device.node for device in unit.devices})
    if len(nodes) > 1:
        raise ResourceExhausted(
            f"unit {unit.id} spans the nodes {', '.join(nodes)}",
            remedy="keep the ranks of one unit on one node; replicas may be on different ones",
            field="plan.devices",
        )
    return nodes[0]


def meeting_point(prefix: str) -> Rendezvous:
    """A free port of this host's loopback: rank 0 listens there as soon as it starts."""
    return Rendezvous("127.0.0.1", free_port(), prefix)
