"""The common lifecycle of units: order, idempotency, staleness, loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from nereus_common.core.emu import Phase
from nereus_common.core.errors import (
    Conflict,
    DeadlineExceeded,
    IllegalTransition,
    NotFound,
    ProcessLost,
    StaleEpoch,
    StaleVersion,
    Unavailable,
    VerificationFailed,
)
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage, TensorName, UnitId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.stages.base import PullOrder, Rendezvous, UnitSpec
from nereus_common.stages.units import Units
from tests.fakes import Kept, ScriptedHost

pytestmark = pytest.mark.fast

UNIT = UnitId("job.actor.training.e4.r0")


def _spec(epoch: int = 4, seed: int = 0) -> UnitSpec:
    return UnitSpec(
        unit=UNIT,
        job=JobId("job"),
        model_stage=ModelStage("actor", Stage.TRAINING),
        replica=0,
        epoch=epoch,
        model_path="/model",
        plan=StagePlan(Layout(), (DeviceId("node0", "cpu0"),)),
        engine="",
        options={},
        rendezvous=Rendezvous("127.0.0.1", 1, "p"),
        seed=seed,
    )


def _order(version: int) -> PullOrder:
    return PullOrder(version, "bfloat16", (), {}, 1.0, "t")


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
def units(host: ScriptedHost) -> Units:
    return Units(lambda spec: host)


async def _serve(units: Units, version: int = 0) -> None:
    await units.prepare(_spec(), 1.0)
    await units.load(UNIT, 4, version, 1.0)
    await units.commit(UNIT, 4, version, 1.0)


async def test_a_unit_works_only_after_a_version_is_committed(units: Units) -> None:
    await units.prepare(_spec(), 1.0)
    with pytest.raises(IllegalTransition, match="does no work"):
        units.serving(UNIT, 4)
    await units.load(UNIT, 4, 0, 1.0)
    await units.commit(UNIT, 4, 0, 1.0)
    assert units.serving(UNIT, 4).unit.version == 0


async def test_repeated_calls_do_their_work_once(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    await _serve(units)
    assert host.calls == ["prepare", "load", "commit"]


async def test_another_spec_under_the_same_id_is_refused(units: Units) -> None:
    await units.prepare(_spec(), 1.0)
    with pytest.raises(Conflict, match="another spec"):
        await units.prepare(_spec(seed=1), 1.0)


async def test_a_call_of_another_epoch_is_stale(units: Units) -> None:
    await _serve(units)
    with pytest.raises(StaleEpoch):
        await units.pull(UNIT, 3, _order(1))
    with pytest.raises(StaleEpoch):
        await units.release(UNIT, 3)


async def test_a_failed_pull_leaves_the_old_version_serving(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    host.failures["pull"] = Unavailable("the source is gone")
    with pytest.raises(Unavailable):
        await units.pull(UNIT, 4, _order(1))
    assert units.serving(UNIT, 4).unit.version == 0


async def test_between_apply_and_commit_nothing_is_served(units: Units) -> None:
    await _serve(units)
    await units.pull(UNIT, 4, _order(1))
    await units.verify(UNIT, 4, 1, "bfloat16", {0: 7}, 1.0)
    with pytest.raises(IllegalTransition, match="loaded"):
        units.serving(UNIT, 4)
    await units.commit(UNIT, 4, 1, 1.0)
    assert units.serving(UNIT, 4).unit.version == 1


async def test_a_unit_that_differs_after_applying_never_serves_again(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    await units.pull(UNIT, 4, _order(1))
    host.digest_of_rank = 8
    with pytest.raises(VerificationFailed, match=r"ranks \[0\]"):
        await units.verify(UNIT, 4, 1, "bfloat16", {0: 7}, 1.0)
    with pytest.raises(IllegalTransition):
        await units.commit(UNIT, 4, 1, 1.0)


async def test_a_lost_process_is_named_by_every_later_call(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    host.failures["pull"] = ProcessLost("worker r0 (pid 1) was killed")
    with pytest.raises(ProcessLost):
        await units.pull(UNIT, 4, _order(1))
    with pytest.raises(ProcessLost, match="worker r0"):
        units.serving(UNIT, 4)
    (entry,) = units.entries()
    assert entry.unit.phase is Phase.LOST


async def test_a_loss_that_is_noticed_during_a_call_is_what_the_call_raises(units: Units, host: ScriptedHost) -> None:
    await units.prepare(_spec(), 1.0)
    host.blocked["pull"] = asyncio.Event()
    host.failures["pull"] = lost = ProcessLost("worker r0 (pid 1) was killed")
    pulling = asyncio.create_task(units.pull(UNIT, 4, _part(3)))
    await asyncio.sleep(0)
    units.note_loss(UNIT, lost)
    host.blocked["pull"].set()
    with pytest.raises(ProcessLost, match="worker r0"):
        await pulling
    assert _phase(units) is Phase.LOST


ASKED: dict[str, Callable[[Units], Awaitable[object]]] = {
    "prepare": lambda units: units.prepare(_spec(), 1.0),
    "load": lambda units: units.load(UNIT, 4, 0, 1.0),
    "describe": lambda units: units.describe(UNIT, 4, 1.0),
    "pull": lambda units: units.pull(UNIT, 4, _order(1)),
    "verify": lambda units: units.verify(UNIT, 4, 0, "float32", {}, 1.0),
    "commit": lambda units: units.commit(UNIT, 4, 0, 1.0),
    "sleep": lambda units: units.sleep(UNIT, 4, 1.0),
    "offer": lambda units: units.offer(UNIT, 4, 0, 1.0),
    "digest": lambda units: units.digest(UNIT, 4, 0, 1.0),
}
BEFORE = {"prepare": (), "load": ("prepare",), "describe": ("prepare",), "verify": ("prepare", "load")}
SERVED = ("prepare", "load", "commit")


@pytest.mark.parametrize("asked", ASKED)
async def test_a_call_that_a_process_answered_before_it_was_lost_raises_the_loss(
    units: Units, host: ScriptedHost, asked: str
) -> None:
    """Its answer and the loss may be seen in either order; the caller is told who was lost, not that it may not ask."""
    for before in BEFORE.get(asked, SERVED):
        if before != asked:
            await ASKED[before](units)
    host.blocked[asked] = asyncio.Event()
    call = asyncio.ensure_future(ASKED[asked](units))
    await asyncio.sleep(0)
    units.note_loss(UNIT, ProcessLost("worker r0 (pid 1) was killed"))
    host.blocked[asked].set()
    with pytest.raises(ProcessLost, match="worker r0"):
        await call
    if asked == "prepare":
        assert host.released.is_set() and not units.entries()
    else:
        assert _phase(units) is Phase.LOST


async def test_release_ends_a_call_that_is_under_way(units: Units, host: ScriptedHost) -> None:
    host.blocked["prepare"] = asyncio.Event()
    preparing = asyncio.create_task(units.prepare(_spec(), 1.0))
    await asyncio.sleep(0)
    async with asyncio.timeout(1.0):
        await units.release(UNIT, 4)
    assert host.released.is_set()
    host.failures["prepare"] = ProcessLost("stopped")
    host.blocked["prepare"].set()
    with pytest.raises(ProcessLost):
        await preparing
    assert not units.entries()


async def test_releasing_what_is_not_known_is_no_error(units: Units) -> None:
    await units.release(UNIT, 4)
    with pytest.raises(NotFound):
        await units.load(UNIT, 4, 0, 1.0)


def _part(version: int, more: bool = False) -> PullOrder:
    return replace(_order(version), state=True, more=more)


def _phase(units: Units) -> Phase:
    (entry,) = units.entries()
    return entry.unit.phase


async def test_a_unit_that_offers_its_state_does_no_work_until_it_withdraws(units: Units) -> None:
    await _serve(units)
    for _ in range(2):
        await units.offer(UNIT, 4, 0, 1.0)
        with pytest.raises(IllegalTransition, match="offering"):
            units.serving(UNIT, 4)
    for _ in range(2):
        await units.withdraw(UNIT, 4, 1.0)
        assert units.serving(UNIT, 4).unit.version == 0


async def test_a_refused_offer_leaves_the_unit_at_work(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    host.failures["offer"] = StaleVersion("version 0 is held")
    with pytest.raises(StaleVersion):
        await units.offer(UNIT, 4, 1, 1.0)
    assert _phase(units) is Phase.ACTIVE


async def test_what_is_not_offered_cannot_be_dropped(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    with pytest.raises(IllegalTransition):
        await units.drop(UNIT, 4, [TensorName("a")], 1.0)
    assert "drop" not in host.calls


async def test_a_unit_that_dropped_anything_is_drained_and_never_withdraws(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    await units.offer(UNIT, 4, 0, 1.0)
    host.failures["drop"] = Unavailable("half of it is gone")
    with pytest.raises(Unavailable):
        await units.drop(UNIT, 4, [TensorName("a")], 1.0)
    assert _phase(units) is Phase.DRAINED
    with pytest.raises(IllegalTransition):
        await units.withdraw(UNIT, 4, 1.0)
    with pytest.raises(IllegalTransition):
        units.serving(UNIT, 4)


async def test_a_drained_unit_serves_again_once_its_gaps_are_filled_and_verified(units: Units) -> None:
    await _serve(units)
    await units.offer(UNIT, 4, 0, 1.0)
    await units.drop(UNIT, 4, [TensorName("a")], 1.0)
    await units.pull(UNIT, 4, _part(0))
    await units.verify(UNIT, 4, 0, "float32", {}, 1.0)
    await units.commit(UNIT, 4, 0, 1.0)
    assert units.serving(UNIT, 4).unit.version == 0


async def test_a_state_is_filled_part_by_part_and_a_failed_part_can_be_repeated(
    units: Units, host: ScriptedHost
) -> None:
    await units.prepare(_spec(), 1.0)
    await units.pull(UNIT, 4, _part(3, more=True))
    host.failures["pull"] = Unavailable("the source is gone")
    with pytest.raises(Unavailable):
        await units.pull(UNIT, 4, _part(3))
    assert _phase(units) is Phase.PREPARED
    del host.failures["pull"]
    await units.pull(UNIT, 4, _part(3))
    with pytest.raises(IllegalTransition):
        units.serving(UNIT, 4)
    await units.verify(UNIT, 4, 3, "float32", {}, 1.0)
    assert _phase(units) is Phase.LOADED


async def test_a_unit_that_serves_takes_no_state(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    with pytest.raises(IllegalTransition):
        await units.pull(UNIT, 4, _part(1))
    assert "pull" not in host.calls and _phase(units) is Phase.ACTIVE


async def test_a_unit_that_never_served_gives_its_parts_back_and_is_drained(units: Units) -> None:
    await units.prepare(_spec(), 1.0)
    await units.pull(UNIT, 4, _part(3, more=True))
    await units.offer(UNIT, 4, 3, 1.0)
    assert _phase(units) is Phase.DRAINED
    await units.drop(UNIT, 4, [TensorName("a")], 1.0)
    with pytest.raises(IllegalTransition):
        await units.withdraw(UNIT, 4, 1.0)


async def test_a_unit_that_slept_is_loaded_anew_before_it_serves_the_same_version(
    units: Units, host: ScriptedHost
) -> None:
    await _serve(units, 3)
    await units.sleep(UNIT, 4, 1.0)
    await units.sleep(UNIT, 4, 1.0)
    for refused in ("asleep", "prepared"):
        with pytest.raises(IllegalTransition, match=refused):
            units.serving(UNIT, 4)
        with pytest.raises(IllegalTransition, match=refused):
            await units.commit(UNIT, 4, 3, 1.0)
        await units.wake(UNIT, 4, 1.0)
    await units.load(UNIT, 4, 3, 1.0)
    await units.commit(UNIT, 4, 3, 1.0)
    assert units.serving(UNIT, 4).unit.version == 3
    assert [call for call in host.calls if call in ("sleep", "wake", "load")] == ["load", "sleep", "wake", "load"]


async def test_a_unit_that_was_kept_from_sleeping_serves_on(units: Units, host: ScriptedHost) -> None:
    await _serve(units, 3)
    host.failures["sleep"] = DeadlineExceeded("a request does not end")
    with pytest.raises(DeadlineExceeded):
        await units.sleep(UNIT, 4, 1.0)
    assert units.serving(UNIT, 4).unit.version == 3
    del host.failures["sleep"]
    await units.sleep(UNIT, 4, 1.0)
    with pytest.raises(IllegalTransition, match="asleep"):
        units.serving(UNIT, 4)


@pytest.mark.parametrize("again", [1, 2])
async def test_a_sync_whose_caller_was_killed_is_done_again_from_wherever_it_was(
    units: Units, host: ScriptedHost, again: int
) -> None:
    """While it pulled, after it had, and between verify and commit; to the same version or to the next."""
    await _serve(units)
    host.blocked["pull"] = asyncio.Event()
    pulling = asyncio.create_task(units.pull(UNIT, 4, _order(1)))
    await asyncio.sleep(0)
    pulling.cancel()
    await asyncio.wait([pulling])
    assert _phase(units) is Phase.ACTIVE
    host.blocked["pull"].set()
    await units.pull(UNIT, 4, _order(1))
    await units.pull(UNIT, 4, _order(1))
    await units.verify(UNIT, 4, 1, "bfloat16", {}, 1.0)
    with pytest.raises(IllegalTransition, match="does no work"):
        units.serving(UNIT, 4)
    await units.pull(UNIT, 4, _order(again))
    await units.verify(UNIT, 4, again, "bfloat16", {}, 1.0)
    await units.commit(UNIT, 4, again, 1.0)
    assert units.serving(UNIT, 4).unit.version == again


async def test_a_lost_unit_gives_what_its_copies_hold_and_does_nothing_else(units: Units, host: ScriptedHost) -> None:
    host.copies = Kept(3)
    await _serve(units, 3)
    units.note_loss(UNIT, ProcessLost("rank 1 is gone"))
    assert (await units.offer(UNIT, 4, 3, 1.0)).version == 3
    assert await units.digest(UNIT, 4, 3, 1.0) == {"parameters": 9}
    await units.withdraw(UNIT, 4, 1.0)
    with pytest.raises(StaleVersion):
        await units.offer(UNIT, 4, 4, 1.0)
    for refused in (units.drop(UNIT, 4, [], 1.0), units.commit(UNIT, 4, 3, 1.0), units.describe(UNIT, 4, 1.0)):
        with pytest.raises(ProcessLost, match="rank 1 is gone"):
            await refused
    assert not {"offer", "digest", "withdraw"} & set(host.calls)


async def test_a_lost_unit_without_copies_gives_nothing(units: Units, host: ScriptedHost) -> None:
    await _serve(units)
    units.note_loss(UNIT, ProcessLost("rank 1 is gone"))
    for refused in (units.offer(UNIT, 4, 0, 1.0), units.digest(UNIT, 4, 0, 1.0), units.withdraw(UNIT, 4, 1.0)):
        with pytest.raises(ProcessLost, match="rank 1 is gone"):
            await refused


async def test_a_release_may_leave_copies_and_a_second_one_ends_them(units: Units, host: ScriptedHost) -> None:
    host.copies = Kept(0)
    await _serve(units)
    assert await units.release(UNIT, 4, keep_copies=True)
    assert "release" not in host.calls and "release_ranks" in host.calls
    assert units.entries()[0].unit.phase is Phase.LOST
    assert await units.release(UNIT, 4, keep_copies=True)
    assert not await units.release(UNIT, 4)
    assert host.released.is_set() and not units.entries()


async def test_a_release_that_may_leave_copies_leaves_nothing_where_there_are_none(
    units: Units, host: ScriptedHost
) -> None:
    await _serve(units)
    assert not await units.release(UNIT, 4, keep_copies=True)
    assert host.released.is_set() and not units.entries()


async def test_a_release_goes_on_when_whoever_asked_for_it_is_gone_and_a_second_one_waits_for_it(
    units: Units, host: ScriptedHost
) -> None:
    await _serve(units)
    host.blocked["release"] = asyncio.Event()
    first = asyncio.create_task(units.release(UNIT, 4))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(units.release(UNIT, 4))
    await asyncio.sleep(0)
    assert not second.done(), "its processes still end"
    host.blocked["release"].set()
    assert not await second
    assert host.released.is_set() and host.calls.count("release") == 1
