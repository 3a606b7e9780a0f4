"""What the registry knows of units: records and grants, written under the fence of this coordinator's lease."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from nereus_common.core.emu import Event, Phase, Unit, step
from nereus_common.core.errors import Conflict
from nereus_common.core.ids import DeviceId, JobId, UnitId
from nereus_common.core.plan import Plan
from nereus_common.registry import Lease, Registry, Versioned
from nereus_common.stages.base import UnitSpec, new_unit

from .remote_unit import RemoteUnit

log = logging.getLogger(__name__)

GRANT_PHASE = "run"
"""Units stay resident on their devices, so one grant covers all their phases."""


class UnitLedger:
    """`fence` is None until this coordinator holds the lease; the registry refuses writes under an older one."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.fence: int | None = None

    def lead(self, lease: Lease) -> None:
        """This coordinator holds the lease from now on."""
        self.fence = lease.fence

    async def add(self, spec: UnitSpec, wanted: Mapping[DeviceId, int]) -> None:
        """Record the unit, then take its bytes on every device: what is recorded can always be released."""
        await self.registry.put_unit(new_unit(spec), expected=0, fence=self.fence)
        await self.grant(spec.unit, wanted)

    async def granted(self, unit: UnitId) -> dict[DeviceId, int]:
        """The unit's bytes by device."""
        return {grant.device: grant.bytes for grant in await self.registry.grants() if grant.unit == unit}

    async def grant(self, unit: UnitId, wanted: Mapping[DeviceId, int]) -> None:
        """Change what the unit holds. ResourceExhausted names the device."""
        await self.registry.grant(unit, GRANT_PHASE, wanted)

    async def known(self, job: JobId) -> tuple[Versioned[Unit], ...]:
        return await self.registry.units(job)

    async def advance(self, units: Iterable[RemoteUnit], *events: Event, version: int | None = None) -> None:
        """Record what happened to units that went through it."""
        for unit in units:
            await self._write(await self.registry.get_unit(unit.unit.job, unit.id), unit, events, version)

    async def took_version(self, units: Iterable[RemoteUnit], version: int) -> None:
        """Record that units serve `version` now, whether they were filled for the first time or brought up to it."""
        for unit in units:
            stored = await self.registry.get_unit(unit.unit.job, unit.id)
            filled = stored.value.phase is Phase.ACTIVE
            events = (Event.UPDATE_STARTED, Event.UPDATED) if filled else (Event.LOAD_STARTED, Event.LOADED)
            await self._write(stored, unit, (*events, Event.COMMITTED), version)

    async def lost(self, unit: Unit) -> None:
        """Record that the unit does not hold its state any more: nobody takes the job over with it."""
        stored = await self.registry.get_unit(unit.job, unit.id)
        if stored.value.phase is not Phase.LOST:
            gone = step(stored.value, Event.LOST, epoch=stored.value.epoch)
            await self.registry.put_unit(gone, expected=stored.revision, fence=self.fence)

    async def _write(
        self, stored: Versioned[Unit], unit: RemoteUnit, events: Iterable[Event], version: int | None
    ) -> None:
        value = stored.value
        for event in events:
            value = step(value, event, epoch=unit.unit.epoch, version=version)
        await self.registry.put_unit(value, expected=stored.revision, fence=self.fence)

    async def remove(self, unit: Versioned[Unit]) -> None:
        """Give its grants back and forget it."""
        await self.registry.release_grants(unit.value.id)
        try:
            await self.registry.remove_unit(unit.value.job, unit.value.id, expected=unit.revision, fence=self.fence)
        except Conflict:
            log.warning("unit %s changed while it was released", unit.value.id)

    async def commit_plan(self, job: JobId, expected_epoch: int, plan: Plan) -> int:
        return await self.registry.commit_plan(job, expected_epoch, plan, fence=self.fence)
