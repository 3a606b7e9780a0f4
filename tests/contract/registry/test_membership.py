"""A service keeps its place while it lives, and takes it again where it stood still and nobody else did."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from nereus_common.core.errors import Conflict, StaleEpoch
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


async def test_a_service_that_is_back_where_it_was_is_alive_at_once_and_its_earlier_life_is_fenced(
    registry: Registry, other: Registry
) -> None:
    dead = await other.announce_service(SERVICE, "killed", 60.0)
    taken: list[Lease] = []
    async with asyncio.timeout(5), membership(registry, SERVICE, ttl=TTL, took=taken.append):
        assert await alive(registry)
        assert taken[0].fence > dead.fence
        with pytest.raises(StaleEpoch):
            await other.renew_lease(dead)


@pytest.mark.parametrize("elsewhere", [{"target": "127.0.0.1:2"}, {"node": "node1"}])
async def test_a_name_that_somebody_else_has_is_not_taken(
    registry: Registry, other: Registry, elsewhere: dict[str, str]
) -> None:
    lease = await other.announce_service(replace(SERVICE, **elsewhere), "living", 60.0)
    with pytest.raises(Conflict):
        async with membership(registry, SERVICE, ttl=TTL):
            raise AssertionError("it was taken")
    await other.renew_lease(lease)
