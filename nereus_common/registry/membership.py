"""A service's place in the registry: announced under a lease, kept alive, given up at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from nereus_common.core.errors import Conflict, StaleEpoch, Unavailable
from nereus_common.registry.base import Registry
from nereus_common.registry.records import Device, Lease, ServiceRecord

log = logging.getLogger(__name__)

TTL = 15.0
"""Seconds after its last renewal at which a service counts as dead; it renews three times as often."""


@asynccontextmanager
async def membership(
    registry: Registry,
    service: ServiceRecord,
    devices: Sequence[Device] = (),
    *,
    ttl: float = TTL,
    took: Callable[[Lease], None] = lambda lease: None,
) -> AsyncIterator[None]:
    """Hold the service's lease while the block runs; its devices join the pool first.

    The service must listen on its target already: whoever held the name from the same node and target is an earlier
    life of it, and dead.

    `took` is told of the lease, and again of the next one where a service that stood still let it lapse: that has a
    higher fence. Raises Conflict when a living service has the name. While the registry cannot be reached the service
    goes on and keeps trying; StaleEpoch (somebody else has the name now) ends the block's task group.
    """
    holder = f"{service.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    for device in devices:
        await registry.put_device(device)
    place = _Place(registry, service, holder, ttl, took)
    await place.take()
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(place.keep(), name=f"{service.name}: lease")
        try:
            yield
        finally:
            renewing.cancel()
            await place.give_up()


class _Place:
    """The lease of one service, over all times that it is taken."""

    def __init__(
        self, registry: Registry, service: ServiceRecord, holder: str, ttl: float, took: Callable[[Lease], None]
    ) -> None:
        self._registry = registry
        self._service = service
        self._holder = holder
        self._ttl = ttl
        self._took = took
        self._lease: Lease | None = None

    async def take(self) -> None:
        self._lease = await _announce(self._registry, self._service, self._holder, self._ttl)
        self._took(self._lease)

    async def keep(self) -> None:
        """Renew for ever; StaleEpoch when somebody else has the name."""
        while True:
            await asyncio.sleep(self._ttl / 3)
            assert self._lease is not None
            try:
                await self._registry.renew_lease(self._lease)
            except Unavailable as error:
                log.warning("lease %s was not renewed, trying again: %s", self._lease.name, error)
            except StaleEpoch as lapsed:
                await self._take_again(lapsed)

    async def give_up(self) -> None:
        assert self._lease is not None
        try:
            await self._registry.release_lease(self._lease)
        except Unavailable:
            log.warning("%s could not give up its lease; it lapses in %.0f s", self._service.name, self._ttl)

    async def _take_again(self, lapsed: StaleEpoch) -> None:
        """The service stood still for longer than its lease: it may go on if nobody has taken its place."""
        try:
            self._lease = await self._registry.announce_service(self._service, self._holder, self._ttl)
        except Conflict:
            raise lapsed from None
        log.warning("%s let its lease lapse and took it again: %s", self._service.name, lapsed)
        self._took(self._lease)


async def _announce(registry: Registry, service: ServiceRecord, holder: str, ttl: float) -> Lease:
    """An earlier life of this service may have died without a word. Where it had this target its lease is ended, or the
    service would be dead for a moment when that lapses; otherwise the end of the lease is waited for."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + ttl + 1.0
    while True:
        try:
            return await registry.announce_service(service, holder, ttl)
        except Conflict:
            if loop.time() > patience:
                raise
            if not await _ended_earlier_life(registry, service):
                await asyncio.sleep(0.5)


async def _ended_earlier_life(registry: Registry, service: ServiceRecord) -> bool:
    """No two processes of a node listen on one target."""
    for known in await registry.services():
        same = (known.service.name, known.service.node, known.service.target)
        if same == (service.name, service.node, service.target):
            return await registry.release_lease(known.lease)
    return False
