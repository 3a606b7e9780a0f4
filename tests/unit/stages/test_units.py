"""The common lifecycle of units: order, idempotency, staleness, loss."""

from __future__ import annotations

import asyncio

import pytest

from nereus_common.core.emu import Phase
from nereus_common.core.errors import (
    Conflict,
    IllegalTransition,
    NotFound,
    ProcessLost,
    StaleEpoch,
    Unavailable,
    VerificationFailed,
)
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage, UnitId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.stages.base import PullOrder, Rendezvous, UnitSpec
from nereus_common.stages.units import Units
from tests.fakes import ScriptedHost

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
    host.digest = 8
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
