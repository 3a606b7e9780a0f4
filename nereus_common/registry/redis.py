"""The registry on a Redis (6.2 or newer) or Valkey server. What is atomic is one script; see `scripts` for the keys."""

from __future__ import annotations

import time as clocks
from collections.abc import Mapping
from typing import Any

from nereus_common.core.emu import Unit
from nereus_common.core.ids import DeviceId, JobId, TransitionId, UnitId
from nereus_common.core.plan import Plan, plan_from_json
from nereus_common.registry import checks, codec, refusals, scripts
from nereus_common.registry.base import EVENTS_KEPT, Registry
from nereus_common.registry.link import Argument, Link
from nereus_common.registry.records import (
    CommittedPlan,
    Device,
    Grant,
    JobEvent,
    JobRecord,
    Lease,
    LeaseStatus,
    TransitionRecord,
    Versioned,
)


class RedisRegistry(Registry):
    """Made by `open_registry`."""

    def __init__(self, link: Link, *, events_kept: int = EVENTS_KEPT) -> None:
        self._link = link
        self._events_kept = events_kept

    @property
    def known_epoch(self) -> int:
        return self._link.known_epoch

    async def epoch(self) -> int:
        known = self.known_epoch
        (stored,) = await self._link.ask(("GET", scripts.EPOCH))
        return self._link.saw(int(stored or 0), known)

    async def raise_epoch(self) -> int:
        known = self.known_epoch
        return self._link.saw(int(await self._link.run("raise_epoch", [scripts.EPOCH], [])), known)

    # -- the device pool ------------------------------------------------------------------------------------------

    async def put_device(self, device: Device) -> None:
        checks.device(device)
        args: list[Argument] = [str(device.id), device.memory_bytes, device.kind]
        outcome, *granted = await self._link.run("put_device", [scripts.DEVICES, scripts.GRANTS], args)
        if outcome == "in use":
            raise refusals.device_in_use(str(device.id), int(granted[0]), device.memory_bytes)

    async def remove_device(self, device: DeviceId) -> None:
        keys = [scripts.DEVICES, scripts.GRANTS]
        outcome, *granted = await self._link.run("remove_device", keys, [str(device)])
        if outcome == "in use":
            raise refusals.device_in_use(str(device), int(granted[0]), 0)

    async def devices(self) -> tuple[Device, ...]:
        found = []
        for name, text in (await self._hash(scripts.DEVICES)).items():
            memory, kind = text.split(" ", 1)
            found.append(Device(DeviceId.parse(name), kind, int(memory)))
        return tuple(sorted(found, key=lambda device: device.id))

    async def grant(self, unit: UnitId, phase: str, wanted: Mapping[DeviceId, int]) -> None:
        checks.grant(unit, phase, wanted)
        pairs: list[Argument] = [part for device, asked in wanted.items() for part in (str(device), asked)]
        keys = [scripts.DEVICES, scripts.GRANTS]
        outcome, *why = await self._link.run("grant", keys, [unit, phase, *pairs])
        if outcome == "unknown":
            raise refusals.unknown_device(why[0])
        if outcome == "full":
            device, asked, free, memory = why
            raise refusals.no_room(unit, phase, device, int(asked), int(free), int(memory))

    async def release_grants(self, unit: UnitId, phase: str | None = None) -> int:
        _, freed = await self._link.run("release_grants", [scripts.GRANTS], [unit, phase or ""])
        return int(freed)

    async def grants(self) -> tuple[Grant, ...]:
        found = []
        for name, held in (await self._hash(scripts.GRANTS)).items():
            device, unit, phase = name.split(" ")
            found.append(Grant(DeviceId.parse(device), UnitId(unit), phase, int(held)))
        return tuple(sorted(found, key=lambda grant: (grant.device, grant.unit, grant.phase)))

    # -- leases ---------------------------------------------------------------------------------------------------

    async def acquire_lease(self, name: str, holder: str, ttl: float, record: str = "") -> Lease:
        checks.lease(name, holder, ttl)
        args: list[Argument] = [name, holder, round(ttl * 1000), record]
        outcome, *rest = await self._link.run("acquire_lease", [scripts.LEASES, scripts.EPOCH], args)
        if outcome == "held":
            raise refusals.lease_held(name, rest[0], int(rest[1]) / 1000)
        fence = int(rest[0])
        # A fence kept by its holder may lie below the epoch: it is news only when it is above.
        self._link.known_epoch = max(self._link.known_epoch, fence)
        return Lease(name, holder, fence, ttl, record)

    async def renew_lease(self, lease: Lease) -> None:
        outcome = await self._link.run("renew_lease", [scripts.LEASES], [lease.name, lease.holder, lease.fence])
        if outcome[0] == "lost":
            raise refusals.lease_lost(lease.name, lease.holder, lease.fence)

    async def release_lease(self, lease: Lease) -> bool:
        outcome = await self._link.run("release_lease", [scripts.LEASES], [lease.name, lease.holder, lease.fence])
        return bool(outcome[0] == "released")

    async def leases(self) -> tuple[LeaseStatus, ...]:
        found = [
            LeaseStatus(Lease(name, holder, int(fence), int(ttl) / 1000, record), int(left) / 1000)
            for name, holder, fence, ttl, left, record in await self._link.run("list_leases", [scripts.LEASES], [])
        ]
        return tuple(sorted(found, key=lambda status: status.lease.name))

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def put_job(self, job: JobRecord, *, expected: int) -> int:
        checks.job(job.id)
        head = scripts.head(job.id)
        if expected == 0:
            # Listed first: a crash in between leaves an id without a record, which `jobs` skips, never a hidden job.
            await self._link.run("list_job", [scripts.JOBS], [job.id])
        text = codec.job_to_json(job)
        return await self._put(head, head, "record", expected, text, None, f"job {job.id}")

    async def get_job(self, job: JobId) -> Versioned[JobRecord]:
        stored = await self._record(scripts.head(checks.job(job)), "record")
        if stored is None:
            raise refusals.no_job(job)
        return Versioned(codec.job_from_json(stored.value), stored.revision)

    async def jobs(self) -> tuple[Versioned[JobRecord], ...]:
        (ids,) = await self._link.ask(("SMEMBERS", scripts.JOBS))
        if not ids:
            return ()
        texts = await self._link.ask(*(("HGET", scripts.head(JobId(job)), "record") for job in ids))
        records = [_split(text) for text in texts if text is not None]
        found = [Versioned(codec.job_from_json(record.value), record.revision) for record in records]
        return tuple(sorted(found, key=lambda record: (record.value.created, record.value.id)))

    # -- plans ----------------------------------------------------------------------------------------------------

    async def commit_plan(self, job: JobId, expected_epoch: int, plan: Plan, *, fence: int | None = None) -> int:
        checks.job(job)
        # Raised before the commit: a store restored from before it then shows as gone back.
        await self.raise_epoch()
        args: list[Argument] = [expected_epoch, plan.to_json(), _text(fence)]
        outcome, number = await self._link.run("commit_plan", [scripts.plans(job), scripts.head(job)], args)
        if outcome == "barred":
            raise refusals.fenced_off(f"committing a plan of job {job}", fence or 0, int(number))
        if outcome == "stale":
            raise refusals.stale_plan(job, expected_epoch, int(number))
        return int(number)

    async def get_plan(self, job: JobId, epoch: int | None = None) -> CommittedPlan:
        checks.job(job)
        if epoch is None:
            (current,) = await self._link.ask(("HGET", scripts.head(job), "epoch"))
        else:
            current = epoch
        (text,) = await self._link.ask(("HGET", scripts.plans(job), current or 0))
        if text is None:
            raise refusals.no_plan(job, epoch)
        return CommittedPlan(int(current), plan_from_json(text))

    # -- transitions ----------------------------------------------------------------------------------------------

    async def put_transition(self, record: TransitionRecord, *, expected: int, fence: int | None = None) -> int:
        where, head = scripts.transitions(checks.job(record.job)), scripts.head(record.job)
        text, name = codec.transition_to_json(record), checks.transition(record.id)
        return await self._put(where, head, name, expected, text, fence, f"transition {name}")

    async def get_transition(self, job: JobId, transition: TransitionId) -> Versioned[TransitionRecord]:
        stored = await self._record(scripts.transitions(checks.job(job)), transition)
        if stored is None:
            raise refusals.no_transition(job, transition)
        return Versioned(codec.transition_from_json(stored.value), stored.revision)

    async def transitions(self, job: JobId) -> tuple[Versioned[TransitionRecord], ...]:
        stored = await self._hash(scripts.transitions(checks.job(job)))
        records = (_split(text) for text in stored.values())
        found = (Versioned(codec.transition_from_json(record.value), record.revision) for record in records)
        return tuple(sorted(found, key=lambda record: (record.value.created, record.value.id)))

    # -- units ----------------------------------------------------------------------------------------------------

    async def put_unit(self, unit: Unit, *, expected: int, fence: int | None = None) -> int:
        checks.unit(unit.id)
        where, head = scripts.units(checks.job(unit.job)), scripts.head(unit.job)
        return await self._put(where, head, unit.id, expected, codec.unit_to_json(unit), fence, f"unit {unit.id}")

    async def remove_unit(self, job: JobId, unit: UnitId, *, expected: int, fence: int | None = None) -> None:
        where, head = scripts.units(checks.job(job)), scripts.head(job)
        await self._put(where, head, unit, expected, "", fence, f"unit {unit}")

    async def get_unit(self, job: JobId, unit: UnitId) -> Versioned[Unit]:
        stored = await self._record(scripts.units(checks.job(job)), unit)
        if stored is None:
            raise refusals.no_unit(job, unit)
        return Versioned(codec.unit_from_json(stored.value), stored.revision)

    async def units(self, job: JobId) -> tuple[Versioned[Unit], ...]:
        stored = await self._hash(scripts.units(checks.job(job)))
        records = [_split(text) for _, text in sorted(stored.items())]
        return tuple(Versioned(codec.unit_from_json(record.value), record.revision) for record in records)

    # -- events ---------------------------------------------------------------------------------------------------

    async def append_event(self, job: JobId, kind: str, payload: Mapping[str, object], *, time: float) -> int:
        keys = [scripts.events(checks.job(job)), scripts.head(job)]
        args: list[Argument] = [self._events_kept, kind, repr(time), codec.payload_to_json(payload, kind)]
        _, revision = await self._link.run("append_event", keys, args)
        return int(revision)

    async def read_events(
        self, job: JobId, after: int = 0, *, limit: int = 256, wait: float = 0.0
    ) -> tuple[JobEvent, ...]:
        checks.reading(after, limit)
        checks.job(job)
        until = clocks.monotonic() + wait
        while True:
            found = await self._read_now(job, after, limit)
            left = until - clocks.monotonic()
            if found or left <= 0:
                return found
            # In slices, so that a server that died shows within the link's timeout and not after the whole wait.
            piece = min(left, self._link.timeout / 2)
            block = ("XREAD", "COUNT", 1, "BLOCK", max(1, round(piece * 1000)))
            await self._link.ask((*block, "STREAMS", scripts.events(job), f"{after}-0"), extra=piece)

    async def _read_now(self, job: JobId, after: int, limit: int) -> tuple[JobEvent, ...]:
        entries, last = await self._link.ask(
            ("XRANGE", scripts.events(job), f"{after + 1}-0", "+", "COUNT", limit),
            ("HGET", scripts.head(job), "events"),
        )
        found = tuple(_event(name, dict(fields)) for name, fields in entries)
        checks.continuity(job, after, found[0].revision if found else None, int(last or 0))
        return found

    async def close(self) -> None:
        await self._link.close()

    # -- records --------------------------------------------------------------------------------------------------

    async def _put(
        self, where: str, head: str, field: str, expected: int, text: str, fence: int | None, what: str
    ) -> int:
        args: list[Argument] = [field, expected, text, _text(fence)]
        outcome, number = await self._link.run("put_record", [where, head], args)
        if outcome == "barred":
            raise refusals.fenced_off(f"writing {what}", fence or 0, int(number))
        if outcome == "lost":
            raise refusals.lost_race(what, expected, int(number))
        return int(number)

    async def _record(self, where: str, field: str) -> Versioned[str] | None:
        (stored,) = await self._link.ask(("HGET", where, field))
        return None if stored is None else _split(stored)

    async def _hash(self, key: str) -> dict[str, str]:
        (stored,) = await self._link.ask(("HGETALL", key))
        return dict(stored)


def _split(stored: str) -> Versioned[str]:
    revision, text = stored.split(" ", 1)
    return Versioned(text, int(revision))


def _text(fence: int | None) -> str:
    return "" if fence is None else str(fence)


def _event(name: str, fields: Mapping[str, Any]) -> JobEvent:
    return JobEvent(int(name.partition("-")[0]), fields["kind"], fields["payload"], float(fields["time"]))
