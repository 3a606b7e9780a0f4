"""A service keeps its place while it lives, and takes it again where it stood still and nobody else did."""

from __future__ import annotations

import asyncio
import time

import pytest

from nereus_common.core.errors import StaleEpoch
from nereus_common.registry import Lease, Registry, ServiceRecord
from nereus_common.registry.membership import membership

TTL = 0.6
SERVICE = ServiceRecord("training0", "training", "127.0.0.1:1", "node0")


async def alive(registry: Registry) -> bool:
    return any(status.service == SERVICE and status.alive for status in await registry.services())


async def test_a_member_is_alive_until_it_leaves(registry: Registry) -> None:
    async with membership(registry, SERVICE, ttl=TTL):
        await asyncio.sleep(TTL * 2)
        assert await alive(registry)
    assert not await alive(registry)


async def test_a_service_that_stood_still_takes_its_lapsed_place_again_under_a_higher_fence(
    registry: Registry,
) -> None:
    taken: list[Lease] = []
    async with membership(registry, SERVICE, ttl=TTL, took=taken.append):
        time.sleep(TTL * 2)  # noqa: ASYNC251 - the whole loop stands still, as when a library is imported on it
        assert not await alive(registry)
        await asyncio.sleep(TTL)
        assert await alive(registry)
    assert len(taken) == 2 and taken[1].fence > taken[0].fence


async def test_a_service_whose_place_was_taken_meanwhile_ends(registry: Registry, other: Registry) -> None:
    taken: list[Lease] = []
    with pytest.raises(ExceptionGroup) as ended:
        async with membership(registry, SERVICE, ttl=TTL, took=taken.append):
            await registry.release_lease(taken[0])
            await other.announce_service(SERVICE, "a-later-life", 60.0)
            await asyncio.sleep(TTL * 2)
    assert ended.group_contains(StaleEpoch)
