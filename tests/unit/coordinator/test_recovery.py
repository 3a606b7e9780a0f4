"""What the next life of a coordinator makes of what the last one left: from the registry alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from nereus_coordinator.jobs import PlacedJobs, units_in_place
from nereus_coordinator.ledger import UnitLedger
from nereus_coordinator.placement import Placement
from nereus_coordinator.reach import Reach
from nereus_coordinator.transitions import Transitions

from nereus_common.core.emu import Phase, Unit
from nereus_common.core.ids import DeviceId, JobId, ModelStage, TransitionId, unit_id
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.registry import JobRecord, TransitionRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rpc.pool import Channels
from nereus_common.transitions.lifecycle import TransitionState

pytestmark = pytest.mark.fast

JOB = JobId("job")
TRAINING = ModelStage.parse("actor/training")
SLOTS = [DeviceId("node0", f"cpu{slot}") for slot in range(3)]


def _plan(*slots: int) -> Plan:
    return Plan(((TRAINING, StagePlan(Layout(), tuple(SLOTS[slot] for slot in slots), len(slots))),))


def _unit(replica: int, slot: int, epoch: int = 1, phase: Phase = Phase.ACTIVE) -> Unit:
    name = unit_id(JOB, TRAINING, replica, epoch)
    return Unit(name, JOB, TRAINING, replica, Layout(), (SLOTS[slot],), epoch, phase)


@pytest.fixture
async def registry() -> AsyncIterator[MemoryRegistry]:
    async with MemoryRegistry() as opened:
        yield opened


async def _recovered(registry: MemoryRegistry, record: TransitionRecord) -> TransitionRecord:
    await registry.put_transition(record, expected=0)
    async with Channels() as channels:
        ledger, reach = UnitLedger(registry), Reach(registry, channels)
        await Transitions(PlacedJobs(ledger, reach), ledger, reach).recover()
    return (await registry.get_transition(JOB, record.id)).value


@pytest.mark.parametrize("state", [TransitionState.PREPARING, TransitionState.PREPARED, TransitionState.MOVING])
async def test_a_coordinator_starts_also_where_the_stage_services_are_gone_with_the_units(
    registry: MemoryRegistry, state: TransitionState
) -> None:
    await registry.put_job(JobRecord(JOB, "{}", 0.0), expected=0)
    old, new = _unit(0, 0), _unit(0, 1, epoch=2, phase=Phase.PREPARED)
    for unit in (old, new):
        await registry.put_unit(unit, expected=0)
    record = TransitionRecord(TransitionId("t1"), JOB, 1, _plan(0), _plan(1), 0.0, state, units=(new.id,), step=3)
    assert (await _recovered(registry, record)).state is TransitionState.LOST
    (left,) = [unit.value for unit in await registry.units(JOB)]
    assert (left.id, left.phase) == (old.id, Phase.LOST), "the job is not taken over with what it has lost"


async def test_units_that_a_transition_kept_are_known_by_their_devices_under_the_numbers_of_the_new_plan() -> None:
    placement = Placement(JOB, 2, _plan(1, 2), {}, 0)
    kept, made = _unit(1, 1), _unit(1, 2, epoch=2)
    found = units_in_place(placement, [made, kept])
    assert found is not None and [(unit.id, unit.replica) for unit in found] == [(kept.id, 0), (made.id, 1)]


@pytest.mark.parametrize(
    "known",
    [
        [_unit(0, 1)],
        [_unit(0, 1), _unit(1, 2), _unit(2, 0)],
        [_unit(0, 1), replace(_unit(1, 2), phase=Phase.PREPARED)],
        [_unit(0, 1), _unit(1, 0)],
    ],
    ids=["one-is-missing", "one-too-many", "one-does-not-serve", "one-is-elsewhere"],
)
def test_a_job_whose_units_are_not_those_of_its_plan_is_not_taken_over(known: list[Unit]) -> None:
    assert units_in_place(Placement(JOB, 2, _plan(1, 2), {}, 0), known) is None
