"""Jobs, plans and units: records that change by compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from nereus_common.core.emu import Phase
from nereus_common.core.errors import Conflict, InvalidInput, NotFound, StaleEpoch
from nereus_common.core.ids import JobId, TransitionId, UnitId
from nereus_common.registry import CommittedPlan, JobRecord, JobState, Registry, Versioned
from nereus_common.transitions.lifecycle import NodeState, TransitionState

from .conftest import JOB, make_plan, make_transition, make_unit

RECORD = JobRecord(JOB, '{"name": "é\\n"}', created=1e9 + 0.25)


async def winners(attempt: Callable[[int], Awaitable[object]], count: int = 30) -> int:
    """How many of `count` concurrent attempts were not refused."""
    outcomes = await asyncio.gather(*(attempt(number) for number in range(count)), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Conflict):
            raise outcome
    return sum(not isinstance(outcome, Conflict) for outcome in outcomes)


async def test_a_job_comes_back_as_it_was_written(registry: Registry, other: Registry) -> None:
    failed = replace(
        RECORD,
        state=JobState.FAILED,
        steps_done=7,
        error_reason="PROCESS_LOST",
        error_message="rank 1 died",
        error_log=("line 1", "line 2"),
        ended=1e9 + 1.5,
        folder="/runs/a b",
    )
    assert await registry.put_job(failed, expected=0) == 1
    assert await other.get_job(JOB) == Versioned(failed, 1)


async def test_a_job_is_created_once(registry: Registry) -> None:
    await registry.put_job(RECORD, expected=0)
    with pytest.raises(Conflict, match="job job-1 exists already, at revision 1"):
        await registry.put_job(RECORD, expected=0)


async def test_a_job_written_since_is_not_overwritten(registry: Registry, other: Registry) -> None:
    await registry.put_job(RECORD, expected=0)
    assert await other.put_job(replace(RECORD, steps_done=1), expected=1) == 2
    with pytest.raises(Conflict, match="at revision 2, 1 was expected"):
        await registry.put_job(replace(RECORD, steps_done=9), expected=1)
    assert (await registry.get_job(JOB)).value.steps_done == 1


async def test_jobs_are_listed_oldest_first(registry: Registry) -> None:
    assert await registry.jobs() == ()
    for name, created in (("b", 2.0), ("c", 1.0), ("a", 2.0)):
        await registry.put_job(JobRecord(JobId(name), "{}", created), expected=0)
    assert [job.value.id for job in await registry.jobs()] == ["c", "a", "b"]


async def test_a_job_that_is_not_there_is_named(registry: Registry) -> None:
    await registry.append_event(JOB, "log", {}, time=0.0)
    with pytest.raises(NotFound, match="no job job-1"):
        await registry.get_job(JOB)
    with pytest.raises(Conflict, match="does not exist"):
        await registry.put_job(RECORD, expected=3)


async def test_a_job_id_that_would_break_a_key_is_refused(registry: Registry) -> None:
    with pytest.raises(InvalidInput, match="job_id"):
        await registry.put_job(replace(RECORD, id=JobId("a}b")), expected=0)


async def test_of_many_writers_of_one_job_exactly_one_wins(registry: Registry, other: Registry) -> None:
    await registry.put_job(RECORD, expected=0)

    async def write(number: int) -> None:
        await (registry, other)[number % 2].put_job(replace(RECORD, steps_done=number), expected=1)

    assert await winners(write) == 1
    assert (await registry.get_job(JOB)).revision == 2


async def test_plans_are_committed_one_epoch_after_another(registry: Registry, other: Registry) -> None:
    first, second = make_plan(512), make_plan(1024)
    assert await registry.commit_plan(JOB, 0, first) == 1
    assert await other.commit_plan(JOB, 1, second) == 2
    assert await registry.get_plan(JOB) == CommittedPlan(2, second)
    assert await registry.get_plan(JOB, 1) == CommittedPlan(1, first)


@pytest.mark.parametrize(("expected", "why"), [(0, "superseded"), (3, "must have gone back")])
async def test_a_plan_for_another_epoch_than_the_one_in_force_is_refused(
    registry: Registry, expected: int, why: str
) -> None:
    await registry.commit_plan(JOB, 0, make_plan())
    with pytest.raises(StaleEpoch, match=why):
        await registry.commit_plan(JOB, expected, make_plan(1024))
    assert await registry.get_plan(JOB) == CommittedPlan(1, make_plan())


async def test_without_a_plan_there_is_none_to_read(registry: Registry) -> None:
    with pytest.raises(NotFound, match="no plan in force"):
        await registry.get_plan(JOB)
    await registry.commit_plan(JOB, 0, make_plan())
    for epoch in (0, 2):
        with pytest.raises(NotFound, match=f"no plan of epoch {epoch}"):
            await registry.get_plan(JOB, epoch)


async def test_of_many_plans_for_one_epoch_exactly_one_is_committed(registry: Registry, other: Registry) -> None:
    async def commit(number: int) -> None:
        await (registry, other)[number % 2].commit_plan(JOB, 0, make_plan(number + 1))

    assert await winners(commit) == 1
    assert (await registry.get_plan(JOB)).epoch == 1


async def test_a_commit_raises_the_epoch_of_the_registry(registry: Registry) -> None:
    before = await registry.epoch()
    await registry.commit_plan(JOB, 0, make_plan())
    assert await registry.epoch() > before


async def test_a_transition_comes_back_as_it_was_written(registry: Registry, other: Registry) -> None:
    planned = make_transition()
    moving = replace(
        planned,
        state=TransitionState.MOVING,
        dag_json='{"nodes":[]}',
        nodes=(NodeState.DONE, NodeState.RUNNING),
        units=(UnitId("u2"),),
        kept=(UnitId("u1"),),
        rounds={1: 4},
        digests={1: {"parameters": (1 << 64) - 1, "step": 3}},
        step=7,
        bytes_moved=1 << 60,
        seconds={"move": 0.25},
    )
    assert await registry.put_transition(planned, expected=0) == 1
    assert await registry.put_transition(moving, expected=1) == 2
    assert await other.get_transition(JOB, planned.id) == Versioned(moving, 2)
    with pytest.raises(NotFound, match="no transition t9"):
        await other.get_transition(JOB, TransitionId("t9"))


async def test_transitions_are_listed_by_job_oldest_first(registry: Registry) -> None:
    for name, created in (("t2", 2.0), ("t10", 10.0), ("t1", 1.0)):
        await registry.put_transition(make_transition(name, created), expected=0)
    assert [record.value.id for record in await registry.transitions(JOB)] == ["t1", "t2", "t10"]
    assert await registry.transitions(JobId("job-3")) == ()


async def test_of_many_writers_of_one_transition_exactly_one_wins(registry: Registry, other: Registry) -> None:
    await registry.put_transition(make_transition(), expected=0)

    async def write(number: int) -> None:
        await (registry, other)[number % 2].put_transition(make_transition(), expected=1)

    assert await winners(write) == 1


async def test_a_journal_of_a_coordinator_that_was_replaced_is_barred(registry: Registry, other: Registry) -> None:
    await registry.put_transition(make_transition(), expected=0, fence=3)
    await other.put_unit(make_unit(), expected=0, fence=5)
    with pytest.raises(StaleEpoch, match="fence 5"):
        await registry.put_transition(make_transition(), expected=1, fence=3)


async def test_a_unit_comes_back_as_it_was_written(registry: Registry, other: Registry) -> None:
    unit = replace(make_unit(), phase=Phase.ACTIVE, version=12)
    assert await registry.put_unit(unit, expected=0) == 1
    assert await other.get_unit(JOB, unit.id) == Versioned(unit, 1)
    with pytest.raises(NotFound, match="no unit u9"):
        await other.get_unit(JOB, UnitId("u9"))


async def test_units_are_listed_by_job_in_order(registry: Registry) -> None:
    for name in ("u2", "u1"):
        await registry.put_unit(make_unit(name), expected=0)
    await registry.put_unit(make_unit("u3", job=JobId("job-2")), expected=0)
    assert [unit.value.id for unit in await registry.units(JOB)] == ["u1", "u2"]
    assert await registry.units(JobId("job-3")) == ()


async def test_a_unit_is_removed_only_at_the_revision_expected(registry: Registry) -> None:
    unit = make_unit()
    await registry.put_unit(unit, expected=0)
    await registry.put_unit(replace(unit, phase=Phase.RELEASED), expected=1)
    with pytest.raises(Conflict):
        await registry.remove_unit(JOB, unit.id, expected=1)
    await registry.remove_unit(JOB, unit.id, expected=2)
    assert await registry.units(JOB) == ()


async def test_of_many_writers_of_one_unit_exactly_one_wins(registry: Registry, other: Registry) -> None:
    unit = make_unit()
    await registry.put_unit(unit, expected=0)

    async def write(number: int) -> None:
        # All write the same text: even then only one may believe that it moved the unit.
        await (registry, other)[number % 2].put_unit(replace(unit, phase=Phase.PREPARED), expected=1)

    assert await winners(write) == 1


async def test_a_higher_fence_bars_the_coordinator_before_it(registry: Registry, other: Registry) -> None:
    unit = make_unit()
    await registry.put_unit(unit, expected=0, fence=3)
    await other.commit_plan(JOB, 0, make_plan(), fence=5)
    with pytest.raises(StaleEpoch, match="fence 5 has taken over"):
        await registry.put_unit(replace(unit, phase=Phase.PREPARED), expected=1, fence=3)
    with pytest.raises(StaleEpoch, match="fence 5"):
        await registry.commit_plan(JOB, 1, make_plan(), fence=4)
    with pytest.raises(StaleEpoch, match="fence 5"):
        await registry.remove_unit(JOB, unit.id, expected=1, fence=3)
    await registry.put_unit(replace(unit, phase=Phase.PREPARED), expected=1, fence=5)


async def test_a_fence_of_one_job_does_not_bar_another(registry: Registry) -> None:
    await registry.put_unit(make_unit(), expected=0, fence=9)
    await registry.put_unit(make_unit("u1", job=JobId("job-2")), expected=0, fence=1)
