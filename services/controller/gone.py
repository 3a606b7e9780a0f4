"""Errors that mean that somebody is gone, in words that say who."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nereus_common.core.errors import NereusError, NotFound, ProcessLost, Unavailable
from nereus_common.core.ids import JobId
from nereus_common.registry import Registry, ServiceRecord

_LOG_LINES = 20


async def explained(error: NereusError, job: JobId, registry: Registry) -> NereusError:
    """The error of an attempt at `job`, as ProcessLost where it is one in disguise.

    A target that cannot be reached is a service that is gone; a service that knows nothing of a unit or of the job
    that were placed there has lost them with an earlier life of its own.
    """
    match error:
        case Unavailable() if (service := await _service_at(error.details.get("target", ""), registry)) is not None:
            return ProcessLost(
                f"the {service.name} service on {service.node} is gone: {error.message}",
                remedy="`nereus up` starts it again; its log says why it ended",
                process=service.name,
                log="\n".join(await asyncio.to_thread(_tail, Path(service.log))),
            )
        case NotFound() if "unit" in error.details or error.details.get("job") == job:
            return ProcessLost(f"a service was started anew and has lost what was placed there: {error.message}")
        case _:
            return error


async def _service_at(target: str, registry: Registry) -> ServiceRecord | None:
    services = (status.service for status in await registry.services())
    return next((service for service in services if service.target == target), None)


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.is_file() else []
