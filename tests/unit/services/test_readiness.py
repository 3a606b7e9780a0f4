"""An attempt starts when everybody it needs answers; a lease alone proves nothing, and who is missing is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nereus_controller.readiness import await_services, needs_of

from nereus_common.core.errors import Unavailable
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.planning.default import default_plan
from nereus_common.registry import Registry, ServiceRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.server import RpcServer

PLAN = default_plan(
    [DeviceId("node0", "cpu0")], [ModelStage.parse("actor/generation"), ModelStage.parse("actor/training")]
)
NEEDS = needs_of(PLAN)
DEAD = "127.0.0.1:1"


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with MemoryRegistry() as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    made = RpcServer("all in one")
    await made.start()
    yield made
    await made.stop(0)


async def announce(registry: Registry, role: str, target: str) -> None:
    await registry.announce_service(ServiceRecord(role, role, target, "node0"), f"{role}-1", 60.0)


async def wait(
    registry: Registry, timeout: float, told: list[str], heard: asyncio.Event | None = None
) -> ServiceRecord:
    async def waiting(text: str) -> None:
        told.append(text)
        if heard is not None:
            heard.set()

    async with Channels() as channels:
        return await await_services(registry, channels, NEEDS, timeout, waiting)


def test_a_plan_needs_the_coordinator_and_each_stage_on_each_of_its_nodes() -> None:
    assert {("coordinator", ""), ("generation", "node0"), ("training", "node0")} == NEEDS
    assert needs_of(None) == {("coordinator", "")}


async def test_nobody_is_waited_for_where_all_answer(registry: Registry, server: RpcServer) -> None:
    for role in ("coordinator", "generation", "training"):
        await announce(registry, role, server.target)
    told: list[str] = []
    assert (await wait(registry, 5.0, told)).target == server.target
    assert told == []


async def test_a_lease_whose_holder_does_not_answer_is_no_service(registry: Registry, server: RpcServer) -> None:
    for role in ("coordinator", "generation"):
        await announce(registry, role, server.target)
    await announce(registry, "training", DEAD)
    told: list[str] = []
    with pytest.raises(Unavailable, match=r"no training on node0 is alive after 0\.5 s") as missing:
        await wait(registry, 0.5, told)
    assert told == ["waiting for training on node0"]
    assert "nereus up" in missing.value.remedy


async def test_who_comes_late_is_waited_for(registry: Registry, server: RpcServer) -> None:
    for role in ("coordinator", "generation"):
        await announce(registry, role, server.target)
    heard = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(registry, 30.0, [], heard))
        await heard.wait()
        await announce(registry, "training", server.target)
    assert waiting.result().name == "coordinator"
