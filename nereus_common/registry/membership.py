"""A service's place in the registry: announced under a lease, kept alive, given up at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from nereus_common.core.errors import Conflict, Unavailable
from nereus_common.registry.base import Registry
from nereus_common.registry.records import Device, Lease, ServiceRecord

log = logging.getLogger(__name__)

TTL = 15.0
"""Seconds after its last renewal at which a service counts as dead; it renews three times as often."""


@asynccontextmanager
async def membership(
    registry: Registry, service: ServiceRecord, devices: Sequence[Device] = (), *, ttl: float = TTL
) -> AsyncIterator[Lease]:
    """Hold the service's lease while the block runs; its devices join the pool first.

    Raises Conflict when a living service has the name. While the registry cannot be reached the service goes on and
    keeps trying; StaleEpoch (somebody else has the name now) ends the block's task group.
    """
    holder = f"{service.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    for device in devices:
        await registry.put_device(device)
    lease = await _announce(registry, service, holder, ttl)
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(_renew(registry, lease), name=f"{service.name}: lease")
        try:
            yield lease
        finally:
            renewing.cancel()
            try:
                await registry.release_lease(lease)
            except Unavailable:
                log.warning("%s could not give up its lease; it lapses in %.0f s", service.name, ttl)


async def _announce(registry: Registry, service: ServiceRecord, holder: str, ttl: float) -> Lease:
    """An earlier life of this service may have died without a word: wait until its lease has lapsed."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + ttl + 1.0
    while True:
        try:
            return await registry.announce_service(service, holder, ttl)
        except Conflict:
            if loop.time() > patience:
                raise
            await asyncio.sleep(0.5)


async def _renew(registry: Registry, lease: Lease) -> None:
    while True:
        await asyncio.sleep(lease.ttl / 3)
        try:
            await registry.renew_lease(lease)
        except Unavailable as error:
            log.warning("lease %s was not renewed, trying again: %s", lease.name, error)
