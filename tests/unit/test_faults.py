"""The aid that kills processes at chosen points kills there, once, and says when it could not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nereus_common.core.ids import DeviceId, JobId, ModelStage, TransitionId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.registry import TransitionRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.transitions.lifecycle import NodeState, TransitionState
from tests import faults
from tests.faults import Fault, FaultyRegistry, in_state, node_is, rounds_noted, strike, strike_at_event

pytestmark = pytest.mark.fast

JOB = JobId("job-1")
PLAN = Plan(((ModelStage.parse("actor/training"), StagePlan(Layout(), (DeviceId("n", "cpu0"),))),))
PLANNED = TransitionRecord(TransitionId("t1"), JOB, 1, PLAN, PLAN, 1.0, nodes=(NodeState.WAITING,) * 2)
LIFE = (
    PLANNED,
    replace(PLANNED, state=TransitionState.PREPARING),
    replace(PLANNED, state=TransitionState.PREPARED),
    replace(PLANNED, state=TransitionState.MOVING, nodes=(NodeState.RUNNING, NodeState.WAITING)),
    replace(PLANNED, state=TransitionState.MOVING, nodes=(NodeState.RUNNING, NodeState.WAITING), rounds={0: 1}),
    replace(PLANNED, state=TransitionState.MOVING, nodes=(NodeState.DONE, NodeState.RUNNING), rounds={0: 1}),
    replace(PLANNED, state=TransitionState.COMMITTED, nodes=(NodeState.DONE,) * 2, rounds={0: 1}),
    replace(PLANNED, state=TransitionState.DONE, nodes=(NodeState.DONE,) * 2, rounds={0: 1}),
)


@pytest.fixture
def dummy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be killed."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("at", "first"),
    [
        (in_state(TransitionState.PREPARED), 2),
        (node_is(0, NodeState.RUNNING), 3),
        (rounds_noted(0, 1), 4),
        (node_is(1, NodeState.RUNNING), 5),
        (in_state(TransitionState.DONE), 7),
    ],
)
async def test_the_victim_dies_once_its_point_is_recorded_and_before_the_writer_goes_on(
    dummy: subprocess.Popen[bytes], at: faults.Point, first: int
) -> None:
    fault = Fault(at, lambda: dummy.pid)
    async with FaultyRegistry(fault) as registry:
        for revision, record in enumerate(LIFE):
            await registry.put_transition(record, expected=revision)
            assert (dummy.poll() is not None) == (revision >= first)
        assert fault.struck == faults.Struck(LIFE[first], dummy.pid)
        assert (await registry.get_transition(JOB, PLANNED.id)).value == LIFE[-1]


async def test_whoever_watches_a_registry_kills_when_the_point_comes(dummy: subprocess.Popen[bytes]) -> None:
    async with MemoryRegistry() as registry:
        striking = asyncio.create_task(
            strike(registry, JOB, node_is(0, NodeState.RUNNING), lambda: dummy.pid, timeout=10)
        )
        for revision, record in enumerate(LIFE[:3]):
            await registry.put_transition(record, expected=revision)
            await asyncio.sleep(3 * faults.EVERY)
            assert dummy.poll() is None and not striking.done()
        await registry.put_transition(LIFE[3], expected=3)
        assert await striking == faults.Struck(LIFE[3], dummy.pid)
        assert dummy.wait(5) == -9


async def test_a_point_that_never_comes_is_an_error_that_says_how_far_it_got(dummy: subprocess.Popen[bytes]) -> None:
    async with MemoryRegistry() as registry:
        with pytest.raises(AssertionError, match="the job has no transition"):
            await strike(registry, JOB, in_state(TransitionState.DONE), lambda: dummy.pid, timeout=0.02)
        await registry.put_transition(LIFE[-1], expected=0)
        with pytest.raises(AssertionError, match="had passed, or never came: transition t1 is done"):
            await strike(registry, JOB, in_state(TransitionState.MOVING), lambda: dummy.pid, timeout=10)
        assert dummy.poll() is None


async def test_an_event_that_came_before_anybody_watched_still_strikes(dummy: subprocess.Popen[bytes]) -> None:
    async with MemoryRegistry() as registry:
        for step in range(3):
            await registry.append_event(JOB, "step", {"step": step}, time=float(step))
        event = await strike_at_event(registry, JOB, lambda e: e.payload["step"] == 1, lambda: dummy.pid, timeout=10)
        assert event.revision == 2 and dummy.wait(5) == -9
        with pytest.raises(AssertionError, match="the last one has revision 3"):
            await strike_at_event(registry, JOB, lambda e: False, lambda: dummy.pid, timeout=0.02)


def test_a_victim_that_is_dead_already_proves_nothing(dummy: subprocess.Popen[bytes]) -> None:
    faults.kill(dummy.pid)
    with pytest.raises(AssertionError, match="was dead before it was killed"):
        faults.kill(dummy.pid)


def test_a_process_that_no_command_names_is_not_guessed() -> None:
    with pytest.raises(LookupError, match=r"0 processes of nobody have actor\.training"):
        faults.process_of("nobody", "actor.training")()
