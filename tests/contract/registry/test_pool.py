"""Devices and the ledger of grants."""

from __future__ import annotations

import asyncio
import random

import pytest

from nereus_common.core.errors import Conflict, InvalidInput, NotFound, ResourceExhausted
from nereus_common.core.ids import DeviceId, UnitId
from nereus_common.registry import Device, Grant, Registry

GPU0, GPU1 = DeviceId("node0", "gpu0"), DeviceId("node0", "gpu1")
A, B = UnitId("a"), UnitId("b")
BUDGET = (80 << 40) + 1
"""More than 14 digits, an odd number: it must come back to the byte."""


@pytest.fixture(autouse=True)
async def pool(registry: Registry) -> None:
    for device in (GPU1, GPU0):
        await registry.put_device(Device(device, "h200", BUDGET))


async def test_devices_are_listed_in_order_with_their_exact_budget(registry: Registry, other: Registry) -> None:
    assert await other.devices() == (Device(GPU0, "h200", BUDGET), Device(GPU1, "h200", BUDGET))


async def test_several_units_share_a_device_to_the_last_byte(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: BUDGET - 1})
    await registry.grant(B, "sleep", {GPU0: 1})
    assert await registry.grants() == (Grant(GPU0, A, "train", BUDGET - 1), Grant(GPU0, B, "sleep", 1))


async def test_an_overcommit_is_refused_naming_device_and_bytes(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU1: BUDGET - 10})
    with pytest.raises(ResourceExhausted, match=rf"node0/gpu1 cannot grant 11 bytes to b .* 10 of its {BUDGET}") as no:
        await registry.grant(B, "train", {GPU0: 5, GPU1: 11})
    assert no.value.details["device"] == "node0/gpu1"
    assert no.value.details["free"] == "10"


async def test_a_grant_is_all_devices_or_none(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU1: BUDGET})
    with pytest.raises(ResourceExhausted):
        await registry.grant(B, "train", {GPU0: 1, GPU1: 1})
    assert [grant.unit for grant in await registry.grants()] == [A]


async def test_a_grant_replaces_the_former_one_of_its_unit_and_phase(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: BUDGET, GPU1: 7})
    await registry.grant(A, "train", {GPU0: BUDGET})
    await registry.grant(A, "train", {GPU0: BUDGET})
    assert await registry.grants() == (Grant(GPU0, A, "train", BUDGET),)


async def test_a_refused_grant_leaves_the_former_one(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: 5})
    with pytest.raises(ResourceExhausted):
        await registry.grant(A, "train", {GPU0: BUDGET + 1})
    assert await registry.grants() == (Grant(GPU0, A, "train", 5),)


async def test_the_phases_of_one_unit_add_up(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: BUDGET - 1})
    with pytest.raises(ResourceExhausted):
        await registry.grant(A, "sleep", {GPU0: 2})


async def test_release_frees_one_phase_or_all_and_says_how_much(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: 10, GPU1: 20})
    await registry.grant(A, "sleep", {GPU0: 3})
    await registry.grant(B, "train", {GPU0: 4})
    assert await registry.release_grants(A, "train") == 30
    assert await registry.release_grants(A) == 3
    assert await registry.release_grants(A) == 0
    assert await registry.grants() == (Grant(GPU0, B, "train", 4),)


async def test_a_unit_whose_name_begins_like_another_keeps_its_grant(registry: Registry) -> None:
    await registry.grant(UnitId("job.a.training.e1.r1"), "train", {GPU0: 1})
    await registry.grant(UnitId("job.a.training.e1.r10"), "train", {GPU0: 2})
    assert await registry.release_grants(UnitId("job.a.training.e1.r1")) == 1


async def test_an_unknown_device_is_named(registry: Registry) -> None:
    with pytest.raises(NotFound, match="node9/gpu0"):
        await registry.grant(A, "train", {GPU0: 1, DeviceId("node9", "gpu0"): 1})
    assert await registry.grants() == ()


async def test_a_device_neither_leaves_nor_shrinks_below_what_is_granted(registry: Registry) -> None:
    await registry.grant(A, "train", {GPU0: 100})
    with pytest.raises(Conflict, match="100 bytes of it are granted"):
        await registry.put_device(Device(GPU0, "h200", 99))
    with pytest.raises(Conflict, match="cannot leave"):
        await registry.remove_device(GPU0)
    await registry.put_device(Device(GPU0, "h200", 100))
    await registry.release_grants(A)
    await registry.remove_device(GPU0)
    await registry.remove_device(GPU0)
    assert [device.id for device in await registry.devices()] == [GPU1]


@pytest.mark.parametrize("amount", [-1, 1 << 60])
async def test_what_is_not_a_number_of_bytes_is_refused(registry: Registry, amount: int) -> None:
    with pytest.raises(InvalidInput, match="bytes on node0/gpu0"):
        await registry.grant(A, "train", {GPU0: amount})


@pytest.mark.parametrize(("unit", "phase"), [("a b", "train"), ("", "train"), ("a", "two words"), ("a\n", "x")])
async def test_names_that_would_break_a_key_are_refused(registry: Registry, unit: str, phase: str) -> None:
    with pytest.raises(InvalidInput):
        await registry.grant(UnitId(unit), phase, {GPU0: 1})


async def test_of_many_units_that_race_for_a_device_exactly_as_many_as_fit_get_it(
    registry: Registry, other: Registry
) -> None:
    async def ask(number: int) -> bool:
        client = registry if number % 2 else other
        try:
            await client.grant(UnitId(f"u{number}"), "train", {GPU0: BUDGET // 5})
        except ResourceExhausted:
            return False
        return True

    won = await asyncio.gather(*(ask(number) for number in range(40)))
    assert sum(won) == 5
    assert len(await registry.grants()) == 5


@pytest.mark.parametrize("seed", range(3))
async def test_grants_never_exceed_the_budget_while_units_come_and_go(
    registry: Registry, other: Registry, seed: int
) -> None:
    for device in (GPU0, GPU1):
        await registry.put_device(Device(device, "h200", 100))
    working = True

    async def live(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        client = registry if number % 2 else other
        for _ in range(12):
            wanted = {device: dice.randrange(60) for device in (GPU0, GPU1) if dice.random() < 0.8}
            try:
                await client.grant(UnitId(f"u{number}"), dice.choice(["train", "sleep"]), wanted)
            except ResourceExhausted:
                await client.release_grants(UnitId(f"u{number}"))

    async def audit() -> int:
        audits = 0
        while working:
            held = await other.grants()
            for device in (GPU0, GPU1):
                assert sum(grant.bytes for grant in held if grant.device == device) <= 100
            audits += 1
            await asyncio.sleep(0)
        return audits

    auditor = asyncio.create_task(audit())
    await asyncio.gather(*(live(number) for number in range(8)))
    working = False
    assert await auditor > 0
