"""Leases, fences, services, and the registry's own epoch."""

from __future__ import annotations

import asyncio

import pytest

from nereus_common.core.errors import Conflict, InvalidInput, StaleEpoch
from nereus_common.core.ids import DeviceId
from nereus_common.registry import Registry, ServiceRecord

SHORT = 0.15
LONG = 60.0


async def test_a_held_lease_is_refused_to_others_naming_its_holder(registry: Registry, other: Registry) -> None:
    await registry.acquire_lease("coordinator", "first", LONG)
    with pytest.raises(Conflict, match=r"held by first for another [56]\d\.\d s"):
        await other.acquire_lease("coordinator", "second", LONG)


async def test_asking_again_as_the_holder_keeps_the_fence(registry: Registry) -> None:
    lease = await registry.acquire_lease("coordinator", "first", LONG)
    await registry.acquire_lease("other", "x", LONG)
    assert await registry.acquire_lease("coordinator", "first", LONG) == lease


async def test_a_lapsed_lease_can_be_taken_and_the_fence_rises(registry: Registry, other: Registry) -> None:
    old = await registry.acquire_lease("coordinator", "first", SHORT)
    await asyncio.sleep(SHORT * 2)
    new = await other.acquire_lease("coordinator", "second", LONG)
    assert new.fence > old.fence
    with pytest.raises(StaleEpoch, match="no longer held by first"):
        await registry.renew_lease(old)
    assert await registry.release_lease(old) is False
    await other.renew_lease(new)


async def test_a_lapsed_lease_is_not_renewed_even_if_nobody_took_it(registry: Registry) -> None:
    lease = await registry.acquire_lease("coordinator", "first", SHORT)
    await asyncio.sleep(SHORT * 2)
    with pytest.raises(StaleEpoch):
        await registry.renew_lease(lease)
    again = await registry.acquire_lease("coordinator", "first", LONG)
    assert again.fence > lease.fence


async def test_renewal_keeps_a_lease_past_its_first_ttl(registry: Registry, other: Registry) -> None:
    lease = await registry.acquire_lease("coordinator", "first", 1.0)
    for _ in range(6):
        await asyncio.sleep(0.2)
        await registry.renew_lease(lease)
    with pytest.raises(Conflict):
        await other.acquire_lease("coordinator", "second", LONG)


async def test_a_released_lease_is_free_at_once_under_a_higher_fence(registry: Registry) -> None:
    first = await registry.acquire_lease("coordinator", "first", LONG)
    assert await registry.release_lease(first) is True
    assert await registry.release_lease(first) is False
    assert await registry.leases() == ()
    assert (await registry.acquire_lease("coordinator", "second", LONG)).fence > first.fence


async def test_lapsed_leases_stay_listed_until_released(registry: Registry) -> None:
    lapsing = await registry.acquire_lease("b", "holder-b", SHORT, "what b is")
    held = await registry.acquire_lease("a", "holder-a", LONG)
    await asyncio.sleep(SHORT * 2)
    listed = await registry.leases()
    assert [(status.lease, status.alive) for status in listed] == [(held, True), (lapsing, False)]
    assert await registry.release_lease(lapsing) is True
    assert [status.lease for status in await registry.leases()] == [held]


async def test_of_many_who_race_for_a_lease_exactly_one_wins(registry: Registry, other: Registry) -> None:
    async def ask(number: int) -> int | None:
        try:
            return (await (registry if number % 2 else other).acquire_lease("name", f"h{number}", LONG)).fence
        except Conflict:
            return None

    fences = await asyncio.gather(*(ask(number) for number in range(30)))
    assert len([fence for fence in fences if fence is not None]) == 1


@pytest.mark.parametrize(("name", "holder", "ttl"), [("a b", "h", 1.0), ("a", "", 1.0), ("a", "h", 0.0)])
async def test_a_lease_that_makes_no_sense_is_refused(registry: Registry, name: str, holder: str, ttl: float) -> None:
    with pytest.raises(InvalidInput):
        await registry.acquire_lease(name, holder, ttl)


async def test_a_service_is_alive_until_its_lease_lapses_and_gone_once_released(
    registry: Registry, other: Registry
) -> None:
    devices = (DeviceId("node0", "cpu0"), DeviceId("node0", "cpu1"))
    record = ServiceRecord("training-node0", "training", "unix:/tmp/a b.sock", "node0", devices)
    lease = await registry.announce_service(record, "pid-1", LONG)
    await registry.acquire_lease("coordinator", "c", LONG)
    (seen,) = await other.services()
    assert (seen.service, seen.lease, seen.alive) == (record, lease, True)
    await registry.release_lease(lease)
    assert await other.services() == ()


async def test_a_service_that_dies_is_listed_as_dead_and_its_successor_replaces_it(registry: Registry) -> None:
    record = ServiceRecord("training-node0", "training", "127.0.0.1:1", "node0")
    dead = await registry.announce_service(record, "pid-1", SHORT)
    await asyncio.sleep(SHORT * 2)
    assert [status.alive for status in await registry.services()] == [False]
    moved = ServiceRecord("training-node0", "training", "127.0.0.1:2", "node0")
    assert (await registry.announce_service(moved, "pid-2", LONG)).fence > dead.fence
    assert [(status.service, status.alive) for status in await registry.services()] == [(moved, True)]


async def test_two_living_services_cannot_have_one_name(registry: Registry) -> None:
    record = ServiceRecord("training-node0", "training", "127.0.0.1:1", "node0")
    await registry.announce_service(record, "pid-1", LONG)
    with pytest.raises(Conflict, match="service/training-node0"):
        await registry.announce_service(record, "pid-2", LONG)


async def test_the_epoch_rises_with_each_raise_and_each_new_lease(registry: Registry, other: Registry) -> None:
    assert await registry.epoch() == 0
    assert await registry.raise_epoch() == 1
    lease = await other.acquire_lease("coordinator", "first", LONG)
    assert lease.fence == 2 == other.known_epoch
    assert await registry.epoch() == 2 == registry.known_epoch


async def test_concurrent_raises_give_each_caller_its_own_epoch(registry: Registry, other: Registry) -> None:
    raised = await asyncio.gather(*((registry, other)[number % 2].raise_epoch() for number in range(30)))
    assert sorted(raised) == list(range(1, 31))
