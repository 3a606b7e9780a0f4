"""Why the registry says no: one function per refusal, so that every store says it in the same words."""

from __future__ import annotations

from nereus_common.core.errors import Conflict, InvalidInput, NotFound, ResourceExhausted, StaleEpoch


def no_room(unit: str, phase: str, device: str, asked: int, free: int, memory: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"{device} cannot grant {asked} bytes to {unit} in phase {phase}: {free} of its {memory} bytes are free",
        remedy="release another unit's grant there, ask for less, or use another device",
        device=device,
        unit=unit,
        phase=phase,
        asked=asked,
        free=free,
        memory=memory,
    )


def unknown_device(device: str) -> NotFound:
    return NotFound(
        f"device {device} is not in the pool",
        remedy="start a stage service that offers it, or name one that `nereus status` lists",
        device=device,
    )


def device_in_use(device: str, granted: int, memory: int) -> Conflict:
    left = f"shrink to {memory} bytes" if memory else "leave the pool"
    return Conflict(
        f"device {device} cannot {left}: {granted} bytes of it are granted",
        remedy="release the grants on it first",
        device=device,
        granted=granted,
    )


def lost_race(what: str, expected: int, found: int) -> Conflict:
    if found == 0:
        return Conflict(f"{what} does not exist, revision {expected} was expected", remedy="read it again", found=found)
    if expected == 0:
        return Conflict(f"{what} exists already, at revision {found}", remedy="read it, or use another id", found=found)
    return Conflict(
        f"{what} is at revision {found}, {expected} was expected: somebody else wrote it",
        remedy="read it again and decide anew",
        found=found,
    )


def fenced_off(what: str, fence: int, seen: int) -> StaleEpoch:
    return StaleEpoch(
        f"{what} was refused to a coordinator with fence {fence}: one with fence {seen} has taken over",
        remedy="stop acting for this job; acquire the lease again first",
        fence=fence,
        seen=seen,
    )


def stale_plan(job: str, expected: int, current: int) -> StaleEpoch:
    why = "has been superseded" if expected < current else "is ahead of the registry, which must have gone back"
    return StaleEpoch(
        f"job {job} is at plan epoch {current}; the expected epoch {expected} {why}",
        remedy="read the plan in force and decide anew",
        job=job,
        epoch=current,
    )


def lease_held(name: str, holder: str, remaining: float) -> Conflict:
    return Conflict(
        f"lease {name} is held by {holder} for another {remaining:.1f} s",
        remedy="wait until it is released or lapses",
        lease=name,
        holder=holder,
    )


def lease_lost(name: str, holder: str, fence: int) -> StaleEpoch:
    return StaleEpoch(
        f"lease {name} is no longer held by {holder} under fence {fence}: it lapsed, was released or was taken over",
        remedy="stop acting under it, then acquire it again",
        lease=name,
        fence=fence,
    )


def no_job(job: str) -> NotFound:
    return NotFound(f"there is no job {job}", remedy="`nereus job list` names those that exist", job=job)


def no_transition(job: str, transition: str) -> NotFound:
    return NotFound(
        f"job {job} has no transition {transition}",
        remedy=f"`nereus transition list {job}` shows them",
        job=job,
        transition=transition,
    )


def no_unit(job: str, unit: str) -> NotFound:
    return NotFound(f"job {job} has no unit {unit}", job=job, unit=unit)


def no_plan(job: str, epoch: int | None) -> NotFound:
    which = "no plan in force" if epoch is None else f"no plan of epoch {epoch}"
    return NotFound(f"job {job} has {which}", job=job)


def events_gone(job: str, after: int, first: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"events {after + 1} to {first - 1} of job {job} are no longer kept: the watcher is too slow",
        remedy=f"resume after revision {first - 1}, knowing that there is a gap, or from 0",
        job=job,
        first=first,
    )


def events_ahead(job: str, after: int, last: int) -> StaleEpoch:
    return StaleEpoch(
        f"job {job} has events up to {last}, the watcher knows {after}: the registry has gone back",
        remedy="watch again from 0",
        job=job,
        last=last,
    )


def gone_back(store: str, epoch: int, known: int) -> StaleEpoch:
    return StaleEpoch(
        f"{store} is at registry epoch {epoch}, but {known} has been seen: it lost acknowledged writes",
        remedy="restore its newest data, or stop all services and start them on the store as it is",
        epoch=epoch,
        known=known,
    )


def bad_token(field: str, value: str) -> InvalidInput:
    return InvalidInput(
        f"{field}: {value!r} is not usable as a name",
        remedy="use letters, digits and . _ - / : only, and not nothing",
        field=field,
    )
