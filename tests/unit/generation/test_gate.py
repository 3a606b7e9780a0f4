from __future__ import annotations

import asyncio

import pytest

from nereus_common.core.errors import Conflict, DeadlineExceeded, IllegalTransition, StaleVersion
from nereus_common.engines.generation.gate import NONE, Gate

pytestmark = pytest.mark.fast


async def _serving(version: int = 3) -> Gate:
    gate = Gate("unit")
    async with gate.applying(version, 1):
        pass
    gate.commit(version)
    return gate


async def test_an_applied_version_serves_nobody_until_it_is_committed() -> None:
    gate = Gate("unit")
    async with gate.applying(1, 1):
        pass
    with pytest.raises(IllegalTransition), gate.admit("a", NONE):
        pass
    gate.commit(1)
    with gate.admit("a", NONE) as version:
        assert version == 1


async def test_only_the_applied_version_can_be_committed() -> None:
    gate = await _serving(3)
    with pytest.raises(IllegalTransition, match="applied version 3, cannot serve 4"):
        gate.commit(4)
    gate.commit(3)


async def test_a_failed_apply_leaves_nothing_to_serve() -> None:
    gate = await _serving()
    with pytest.raises(RuntimeError):
        async with gate.applying(4, 1):
            raise RuntimeError
    with pytest.raises(IllegalTransition, match="serves no version"), gate.admit("a", NONE):
        pass
    with pytest.raises(IllegalTransition):
        gate.commit(3)


async def test_weights_wait_for_requests_and_admit_none_meanwhile() -> None:
    gate = await _serving()
    order: list[str] = []

    async def change() -> None:
        async with gate.applying(4, 5):
            order.append("applied")

    with gate.admit("a", 3):
        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        with pytest.raises(IllegalTransition, match="taking new weights"), gate.admit("b", NONE):
            pass
        order.append("finished")
    await changing
    assert order == ["finished", "applied"]


async def test_a_drain_past_its_deadline_names_the_requests_and_serves_on() -> None:
    gate = await _serving()
    with gate.admit("slow", NONE):
        with pytest.raises(DeadlineExceeded, match="slow"):
            async with gate.applying(4, 0.01):
                pass
        with gate.admit("other", 3) as version:
            assert version == 3


async def test_another_version_and_a_taken_id_are_refused() -> None:
    gate = await _serving()
    with pytest.raises(StaleVersion), gate.admit("a", 2):
        pass
    with gate.admit("a", 3), pytest.raises(Conflict), gate.admit("a", 3):
        pass
    assert gate.active == 0


async def test_an_asleep_unit_admits_nobody() -> None:
    gate = await _serving()
    gate.sleep()
    with pytest.raises(IllegalTransition, match="asleep"), gate.admit("a", NONE):
        pass
    gate.wake()
    with gate.admit("a", NONE), pytest.raises(IllegalTransition, match="in flight"):
        gate.sleep()
