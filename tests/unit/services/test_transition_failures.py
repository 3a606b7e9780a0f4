"""What the loop makes of a transition whose run failed: the journal says whether the job is as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from nereus_controller.moves import Asked, MoveQueue, Mover

from nereus_common.core.errors import DeadlineExceeded, NereusError, NotFound, ProcessLost, Unavailable
from nereus_common.core.ids import DeviceId, JobId, ModelStage, TransitionId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.registry import TransitionRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rpc.pool import Channels
from nereus_common.transitions.lifecycle import TransitionState

pytestmark = pytest.mark.fast

JOB = JobId("job")
PLAN = Plan(((ModelStage.parse("actor/training"), StagePlan(Layout(), (DeviceId("n", "cpu0"),))),))
RECORD = TransitionRecord(TransitionId("t1"), JOB, 1, PLAN, PLAN, 0.0)


@dataclass
class FailingCoordinator:
    """Leaves the transition in `state` and raises `error`."""

    registry: MemoryRegistry
    state: TransitionState
    error: NereusError

    async def prepare_transition(self, record: TransitionRecord, timeout: float) -> None:
        await self.registry.put_transition(replace(record, state=TransitionState.PREPARED), expected=1)

    async def run_transition(self, record: TransitionRecord, version: int, channels: Any, timeout: float) -> None:
        await self.registry.put_transition(replace(record, state=self.state), expected=2)
        raise self.error

    async def abort_transition(self, record: TransitionRecord, timeout: float) -> None:
        raise AssertionError("it was run")


@pytest.fixture
async def registry() -> AsyncIterator[MemoryRegistry]:
    async with MemoryRegistry() as opened:
        await opened.put_transition(RECORD, expected=0)
        yield opened


async def _cross(registry: MemoryRegistry, state: TransitionState, error: NereusError) -> object:
    async def nothing(*given: Any) -> None:
        """Emits no event, and nothing has to stand still."""

    queue: MoveQueue = MoveQueue()
    queue.put_nowait(Asked(RECORD.id, due=1))
    coordinator: Any = FailingCoordinator(registry, state, error)
    timeouts = {"prepare_timeout": 1.0, "run_timeout": 1.0}
    async with Channels() as channels:
        mover = Mover(JOB, registry, lambda: coordinator, channels, queue, nothing, **timeouts, clock=lambda: 0.0)
        async with mover.open():
            return await mover.at_boundary(1, nothing, due=True)


@pytest.mark.parametrize("error", [ProcessLost("a new worker died"), NotFound("another life"), Unavailable("gone")])
@pytest.mark.parametrize("state", [TransitionState.PREPARED, TransitionState.UNDONE])
async def test_whatever_went_wrong_a_job_of_which_nothing_was_moved_goes_on(
    registry: MemoryRegistry, state: TransitionState, error: NereusError
) -> None:
    assert await _cross(registry, state, error) is None


@pytest.mark.parametrize("error", [ProcessLost("an old worker died"), Unavailable("gone"), DeadlineExceeded("late")])
@pytest.mark.parametrize("state", [TransitionState.MOVING, TransitionState.COMMITTED, TransitionState.LOST])
async def test_a_job_that_may_be_moved_or_lost_does_not_go_on_as_if_it_were_not(
    registry: MemoryRegistry, state: TransitionState, error: NereusError
) -> None:
    with pytest.raises(type(error)):
        await _cross(registry, state, error)
