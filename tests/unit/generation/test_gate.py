from __future__ import annotations

import asyncio

import pytest

from nereus_common.core.errors import Conflict, DeadlineExceeded, IllegalTransition, StaleVersion, Unavailable
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


async def test_a_unit_that_slept_serves_nobody_until_a_version_is_applied_and_committed() -> None:
    gate = await _serving(3)
    with gate.admit("a", NONE), pytest.raises(IllegalTransition, match="1 requests"):
        gate.sleep()
    gate.sleep()
    for closed in ("asleep", "serves no version"):
        with pytest.raises(IllegalTransition, match=closed), gate.admit("a", NONE):
            pass
        with pytest.raises(IllegalTransition, match=closed), gate.admit_across("a", NONE):
            pass
        with pytest.raises(IllegalTransition, match="applied version -1, cannot serve 3"):
            gate.commit(3)
        gate.wake()
    async with gate.applying(3, 1):
        pass
    gate.commit(3)
    with gate.admit("a", 3):
        pass


async def test_a_drained_unit_takes_no_request_until_a_commit_or_a_word_and_keeps_those_it_has() -> None:
    gate = await _serving(3)
    with gate.admit("first", NONE), gate.admit_across("second", NONE):
        gate.stop_admitting()
        for admit in (gate.admit, gate.admit_across):
            with pytest.raises(Unavailable, match="unit unit is being drained"), admit("late", NONE):
                pass
        assert await gate.emptied(0.01) == 2
        assert await _soon(gate, "second[0]"), "what is here goes on"
    assert await gate.emptied(1) == 0
    gate.admit_again()
    with gate.admit("again", NONE):
        pass
    gate.stop_admitting()
    async with gate.applying(4, 1):
        pass
    gate.commit(4)
    with gate.admit("after", 4):
        pass


async def _never() -> None:
    raise AssertionError("interrupted without need")


async def _soon(gate: Gate, name: str, seconds: float = 5) -> bool:
    return await gate.park(name, asyncio.get_running_loop().time() + seconds)


async def test_new_weights_interrupt_what_crosses_and_wait_for_the_rest() -> None:
    gate = await _serving(3)
    order: list[str] = []
    interrupted = asyncio.Event()

    async def cross() -> None:
        async def interrupt() -> None:
            interrupted.set()

        with gate.flight("across[0]", interrupt):
            await interrupted.wait()
            order.append("interrupted")
        assert await _soon(gate, "across[0]")
        with gate.flight("across[0]", _never) as version:
            order.append(f"goes on under {version}")

    async def change() -> None:
        async with gate.applying(4, 5):
            order.append("applied")

    with gate.admit_across("across", 3):
        with gate.admit("plain", NONE):
            tasks = [asyncio.create_task(cross())]
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(change()))
            await interrupted.wait()
            await asyncio.sleep(0)
            order.append("plain ended")
        await tasks[1]
        await asyncio.sleep(0.01)
        assert (gate.parked, gate.active) == (1, 0)  # applied is not served
        gate.commit(4)
        await tasks[0]
    assert order == ["interrupted", "plain ended", "applied", "goes on under 4"]


async def test_what_is_parked_goes_on_under_the_old_version_when_the_drain_fails() -> None:
    gate = await _serving(3)
    with gate.admit("slow", NONE):
        changing = asyncio.create_task(gate.applying(4, 0.02).__aenter__())
        await asyncio.sleep(0)
        assert await _soon(gate, "across[0]")
        with pytest.raises(DeadlineExceeded, match="slow"):
            await changing
        with gate.flight("across[0]", _never) as version:
            assert version == 3


async def test_a_failed_apply_ends_what_is_parked_and_says_why() -> None:
    gate = await _serving()
    with pytest.raises(RuntimeError):
        async with gate.applying(4, 1):
            parked = [asyncio.create_task(_soon(gate, name)) for name in ("a[0]", "a[1]")]
            await asyncio.sleep(0)
            raise RuntimeError("no memory")
    for task in parked:
        with pytest.raises(Unavailable, match=r"request a\[.\] was parked while unit unit took version 4.*no memory"):
            await task
    assert gate.parked == 0


async def test_a_wait_for_a_commit_ends_at_its_deadline_naming_unit_and_version() -> None:
    gate = await _serving(3)
    async with gate.applying(4, 1):
        with pytest.raises(DeadlineExceeded, match="unit is taking new weights, version 4"):
            await _soon(gate, "a[0]", 0.01)
    with pytest.raises(DeadlineExceeded, match="version 4 waits to be committed"):
        await _soon(gate, "a[0]", 0.01)


async def test_one_that_is_withdrawn_waits_no_longer() -> None:
    gate = await _serving()
    async with gate.applying(4, 1):
        waiting = asyncio.create_task(_soon(gate, "a[0]"))
        await asyncio.sleep(0)
        gate.withdraw("a[0]")
        assert not await waiting
    gate.withdraw("never heard of")


async def test_one_that_crosses_may_come_while_weights_do_unless_it_wants_a_version() -> None:
    gate = Gate("unit")
    with pytest.raises(IllegalTransition, match="serves no version"), gate.admit_across("a", NONE):
        pass
    async with gate.applying(1, 1):
        with gate.admit_across("a", NONE), pytest.raises(Conflict), gate.admit_across("a", NONE):
            pass
        with pytest.raises(IllegalTransition, match="taking new weights"), gate.admit_across("a", 1):
            pass
    with gate.admit_across("a", NONE), pytest.raises(IllegalTransition), gate.flight("a[0]", _never):
        pass
    gate.commit(1)
    with pytest.raises(StaleVersion), gate.admit_across("a", 2):
        pass
