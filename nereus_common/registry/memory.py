"""The registry in this process's memory: for tests and simulations. Same laws, nothing survives the process.

No method awaits between reading and writing, so each is atomic among the tasks of one event loop.
"""

from __future__ import annotations

import asyncio
import time as clocks
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nereus_common.core.emu import Unit
from nereus_common.core.ids import DeviceId, JobId, TransitionId, UnitId
from nereus_common.core.plan import Plan
from nereus_common.registry import checks, codec, refusals
from nereus_common.registry.base import EVENTS_KEPT, Registry
from nereus_common.registry.records import (
    CommittedPlan,
    Device,
    Grant,
    JobEvent,
    JobRecord,
    Lease,
    LeaseStatus,
    T,
    TransitionRecord,
    Versioned,
)


@dataclass
class _Job:
    """Everything under one job's tag."""

    record: Versioned[JobRecord] | None = None
    plans: list[Plan] = field(default_factory=list)
    units: dict[UnitId, Versioned[Unit]] = field(default_factory=dict)
    transitions: dict[TransitionId, Versioned[TransitionRecord]] = field(default_factory=dict)
    events: deque[JobEvent] = field(default_factory=deque)
    last_event: int = 0
    fence: int = 0
    appended: asyncio.Event = field(default_factory=asyncio.Event)

    def bar(self, what: str, fence: int | None) -> None:
        if fence is None:
            return
        if fence < self.fence:
            raise refusals.fenced_off(what, fence, self.fence)
        self.fence = fence


class MemoryRegistry(Registry):
    """`clock`: seconds, for leases only; `events_kept`: per job."""

    def __init__(self, *, events_kept: int = EVENTS_KEPT, clock: Callable[[], float] = clocks.monotonic) -> None:
        self._events_kept = events_kept
        self._clock = clock
        self._epoch = 0
        self._devices: dict[DeviceId, Device] = {}
        self._grants: dict[tuple[DeviceId, UnitId, str], int] = {}
        self._leases: dict[str, tuple[Lease, float]] = {}
        self._jobs: dict[JobId, _Job] = {}

    def _job(self, job: JobId) -> _Job:
        return self._jobs.setdefault(checks.job(job), _Job())

    @property
    def known_epoch(self) -> int:
        return self._epoch

    async def epoch(self) -> int:
        return self._epoch

    async def raise_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    async def put_device(self, device: Device) -> None:
        checks.device(device)
        granted = self._granted(device.id)
        if granted > device.memory_bytes:
            raise refusals.device_in_use(str(device.id), granted, device.memory_bytes)
        self._devices[device.id] = device

    async def remove_device(self, device: DeviceId) -> None:
        granted = self._granted(device)
        if granted:
            raise refusals.device_in_use(str(device), granted, 0)
        self._devices.pop(device, None)

    def _granted(self, device: DeviceId) -> int:
        return sum(held for (where, _, _), held in self._grants.items() if where == device)

    async def devices(self) -> tuple[Device, ...]:
        return tuple(self._devices[device] for device in sorted(self._devices))

    async def grant(self, unit: UnitId, phase: str, wanted: Mapping[DeviceId, int]) -> None:
        checks.grant(unit, phase, wanted)
        for device, asked in wanted.items():
            if device not in self._devices:
                raise refusals.unknown_device(str(device))
            memory = self._devices[device].memory_bytes
            free = memory - self._granted(device) + self._grants.get((device, unit, phase), 0)
            if asked > free:
                raise refusals.no_room(unit, phase, str(device), asked, free, memory)
        self._drop_grants(unit, phase)
        self._grants |= {(device, unit, phase): asked for device, asked in wanted.items()}

    async def release_grants(self, unit: UnitId, phase: str | None = None) -> int:
        return self._drop_grants(unit, phase)

    def _drop_grants(self, unit: UnitId, phase: str | None) -> int:
        held = [key for key in self._grants if key[1] == unit and phase in (None, key[2])]
        return sum(self._grants.pop(key) for key in held)

    async def grants(self) -> tuple[Grant, ...]:
        return tuple(Grant(*key, held) for key, held in sorted(self._grants.items()))

    async def acquire_lease(self, name: str, holder: str, ttl: float, record: str = "") -> Lease:
        checks.lease(name, holder, ttl)
        held, until = self._leases.get(name, (None, 0.0))
        remaining = until - self._clock() if held else 0.0
        if held and remaining > 0 and held.holder != holder:
            raise refusals.lease_held(name, held.holder, remaining)
        fence = held.fence if held and remaining > 0 else await self.raise_epoch()
        lease = Lease(name, holder, fence, ttl, record)
        self._leases[name] = (lease, self._clock() + ttl)
        return lease

    def _owns(self, lease: Lease) -> bool:
        held = self._leases.get(lease.name)
        return held is not None and (held[0].holder, held[0].fence) == (lease.holder, lease.fence)

    async def renew_lease(self, lease: Lease) -> None:
        if not self._owns(lease) or self._leases[lease.name][1] <= self._clock():
            raise refusals.lease_lost(lease.name, lease.holder, lease.fence)
        held = self._leases[lease.name][0]
        self._leases[lease.name] = (held, self._clock() + held.ttl)

    async def release_lease(self, lease: Lease) -> bool:
        owned = self._owns(lease)
        if owned:
            del self._leases[lease.name]
        return owned

    async def leases(self) -> tuple[LeaseStatus, ...]:
        now = self._clock()
        return tuple(LeaseStatus(lease, until - now) for _, (lease, until) in sorted(self._leases.items()))

    async def put_job(self, job: JobRecord, *, expected: int) -> int:
        place = self._job(job.id)
        place.record = _replaced(place.record, job, expected, f"job {job.id}")
        return place.record.revision

    async def get_job(self, job: JobId) -> Versioned[JobRecord]:
        place = self._jobs.get(checks.job(job))
        if place is None or place.record is None:
            raise refusals.no_job(job)
        return place.record

    async def jobs(self) -> tuple[Versioned[JobRecord], ...]:
        records = [place.record for place in self._jobs.values() if place.record is not None]
        return tuple(sorted(records, key=lambda record: (record.value.created, record.value.id)))

    async def commit_plan(self, job: JobId, expected_epoch: int, plan: Plan, *, fence: int | None = None) -> int:
        place = self._job(job)
        await self.raise_epoch()
        place.bar(f"committing a plan of job {job}", fence)
        if expected_epoch != len(place.plans):
            raise refusals.stale_plan(job, expected_epoch, len(place.plans))
        place.plans.append(plan)
        return len(place.plans)

    async def get_plan(self, job: JobId, epoch: int | None = None) -> CommittedPlan:
        plans = self._job(job).plans
        wanted = len(plans) if epoch is None else epoch
        if not 1 <= wanted <= len(plans):
            raise refusals.no_plan(job, epoch)
        return CommittedPlan(wanted, plans[wanted - 1])

    async def put_transition(self, record: TransitionRecord, *, expected: int, fence: int | None = None) -> int:
        name = checks.transition(record.id)
        place = self._job(record.job)
        place.bar(f"writing transition {name}", fence)
        written = _replaced(place.transitions.get(name), record, expected, f"transition {name}")
        place.transitions[name] = written
        return written.revision

    async def get_transition(self, job: JobId, transition: TransitionId) -> Versioned[TransitionRecord]:
        found = self._job(job).transitions.get(transition)
        if found is None:
            raise refusals.no_transition(job, transition)
        return found

    async def transitions(self, job: JobId) -> tuple[Versioned[TransitionRecord], ...]:
        known = self._job(job).transitions.values()
        return tuple(sorted(known, key=lambda record: (record.value.created, record.value.id)))

    async def put_unit(self, unit: Unit, *, expected: int, fence: int | None = None) -> int:
        checks.unit(unit.id)
        place = self._job(unit.job)
        place.bar(f"writing unit {unit.id}", fence)
        written = _replaced(place.units.get(unit.id), unit, expected, f"unit {unit.id}")
        place.units[unit.id] = written
        return written.revision

    async def remove_unit(self, job: JobId, unit: UnitId, *, expected: int, fence: int | None = None) -> None:
        place = self._job(job)
        place.bar(f"writing unit {unit}", fence)
        _check_revision(place.units.get(unit), expected, f"unit {unit}")
        place.units.pop(unit, None)

    async def get_unit(self, job: JobId, unit: UnitId) -> Versioned[Unit]:
        found = self._job(job).units.get(unit)
        if found is None:
            raise refusals.no_unit(job, unit)
        return found

    async def units(self, job: JobId) -> tuple[Versioned[Unit], ...]:
        return tuple(unit for _, unit in sorted(self._job(job).units.items()))

    async def append_event(self, job: JobId, kind: str, payload: Mapping[str, object], *, time: float) -> int:
        place = self._job(job)
        text = codec.payload_to_json(payload, kind)
        place.last_event += 1
        place.events.append(JobEvent(place.last_event, kind, text, time))
        if len(place.events) > self._events_kept:
            place.events.popleft()
        place.appended.set()
        place.appended = asyncio.Event()
        return place.last_event

    async def read_events(
        self, job: JobId, after: int = 0, *, limit: int = 256, wait: float = 0.0
    ) -> tuple[JobEvent, ...]:
        checks.reading(after, limit)
        place = self._job(job)
        if after == place.last_event and wait > 0:
            try:
                async with asyncio.timeout(wait):
                    await place.appended.wait()
            except TimeoutError:
                return ()
        found = [event for event in place.events if event.revision > after][:limit]
        checks.continuity(job, after, found[0].revision if found else None, place.last_event)
        return tuple(found)

    async def close(self) -> None:
        """Nothing to close."""


def _check_revision(stored: Versioned[T] | None, expected: int, what: str) -> None:
    found = stored.revision if stored else 0
    if found != expected:
        raise refusals.lost_race(what, expected, found)


def _replaced(stored: Versioned[T] | None, value: T, expected: int, what: str) -> Versioned[T]:
    _check_revision(stored, expected, what)
    return Versioned(value, expected + 1)
