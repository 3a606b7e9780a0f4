"""What can be part of a key, and what cannot. Checked here, once, for every store."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, JobId, TransitionId, UnitId, check_name
from nereus_common.registry import refusals
from nereus_common.registry.records import Device

_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-/:]{0,254}")
MAX_BYTES = 1 << 53
"""Scripts count bytes in doubles; below this every count is exact."""


def job(job_id: JobId) -> JobId:
    check_name(job_id, "job_id")
    return job_id


def transition(transition_id: TransitionId) -> TransitionId:
    check_name(transition_id, "transition_id")
    return transition_id


def unit(unit_id: UnitId) -> None:
    _token(unit_id, "unit")


def device(entry: Device) -> None:
    check_name(entry.kind, "device.kind")
    _bytes(entry.memory_bytes, f"memory_bytes of {entry.id}")


def grant(unit_id: UnitId, phase: str, wanted: Mapping[DeviceId, int]) -> None:
    unit(unit_id)
    check_name(phase, "phase")
    for where, asked in wanted.items():
        _bytes(asked, f"bytes on {where}")


def lease(name: str, holder: str, ttl: float) -> None:
    _token(name, "lease")
    _token(holder, "holder")
    if not 0.001 <= ttl <= 86_400:
        raise InvalidInput(f"ttl of lease {name} is {ttl} s", remedy="give 0.001 to 86400 seconds", field="ttl")


def reading(after: int, limit: int) -> None:
    if after < 0 or limit < 1:
        raise InvalidInput(
            f"cannot read {limit} events after revision {after}",
            remedy="revisions start at 0 (before the first), and at least one event is read",
            field="after" if after < 0 else "limit",
        )


def continuity(job_id: JobId, after: int, first: int | None, last: int) -> None:
    """Refuse a reader who would miss events: `first` is the oldest it would be given, `last` the newest there is."""
    if after > last:
        raise refusals.events_ahead(job_id, after, last)
    if after and first is not None and first > after + 1:
        raise refusals.events_gone(job_id, after, first)


def _token(value: str, field: str) -> None:
    if not _TOKEN.fullmatch(value):
        raise refusals.bad_token(field, value)


def _bytes(value: int, field: str) -> None:
    if not 0 <= value < MAX_BYTES:
        raise InvalidInput(f"{field}: {value} is not a number of bytes", remedy="give 0 to 2^53 - 1", field=field)
