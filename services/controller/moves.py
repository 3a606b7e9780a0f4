"""The transitions of a running job, seen from its loop: prepared beside it, run at a safe boundary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from nereus_common.core.errors import Conflict, NereusError
from nereus_common.core.ids import JobId, TransitionId
from nereus_common.registry import Registry, TransitionRecord
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.transitions import dag_from_json
from nereus_common.transitions.lifecycle import TransitionState

from .checkpoints import Emit
from .coordinator import Coordinator
from .placed import PlacedJob
from .synced import Synced

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
LAST_SECONDS = 10.0
"""For which the end of a job waits to tell that a transition is done."""
NOTHING_MOVED = (TransitionState.PREPARING, TransitionState.PREPARED, TransitionState.UNDONE)
"""Where a transition stands in one of these after its run failed, the job is as it was before."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A recorded transition. `due`: the version at whose boundary it has to run, None: at the first that it can."""

    transition: TransitionId
    due: int | None = None


StandStill = Callable[[TransitionRecord], Awaitable[None]]
MoveQueue = asyncio.Queue[Asked]
"""What was asked of one job and not yet begun."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The job under its new plan, all units at one version."""

    record: TransitionRecord
    placed: PlacedJob
    epoch: int
    synced: Sequence[Synced]


class Mover:
    """One at a time, in the order they were asked for. `coordinator` gives the present one.

    `prepare_timeout`, `run_timeout` in seconds; `clock` gives seconds since the Unix epoch.
    """

    def __init__(
        self,
        job: JobId,
        registry: Registry,
        coordinator: Callable[[], Coordinator],
        channels: Channels,
        queue: MoveQueue,
        emit: Emit,
        *,
        prepare_timeout: float,
        run_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._registry = registry
        self._coordinator = coordinator
        self._channels = channels
        self._queue = queue
        self._emit = emit
        self._timeouts = prepare_timeout, run_timeout
        self._clock = clock
        self._current: tuple[Asked, TransitionRecord, asyncio.Task[bool]] | None = None
        self._begun, self._free = asyncio.Event(), asyncio.Event()
        self._releasing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """While the block runs, transitions are prepared as they come; those left at its end are undone."""
        taking = asyncio.create_task(self._take_all(), name=f"{self._job}: transitions")
        try:
            yield
        finally:
            taking.cancel()
            await asyncio.wait([taking])
            await asyncio.shield(self._give_up())

    async def at_boundary(self, version: int, stand_still: StandStill, *, due: bool = False) -> Moved | None:
        """Run the transition that is prepared; None when there is none, or when it failed and the job is as before.

        `stand_still` is awaited before the run, with the record of what is prepared. `due`: one was asked for this very
        version; wait until it is prepared. Raises where state may be gone.
        """
        if due:
            await self._begun.wait()
        if self._current is None:
            return None
        asked, record, preparing = self._current
        if not preparing.done() and asked.due != version:
            return None
        try:
            return await self._run(record, version, stand_still) if await preparing else None
        finally:
            self._current = None
            self._begun.clear()
            self._free.set()

    async def _run(self, record: TransitionRecord, version: int, stand_still: StandStill) -> Moved | None:
        try:
            await self._stand_still(await self._record(record.id), stand_still)
            placed, epoch, synced = await self._coordinator().run_transition(
                record, version, self._channels, self._timeouts[1]
            )
        except NereusError as error:
            if await self._tell(record.id, error) not in NOTHING_MOVED:
                raise
            log.warning("job %s: transition %s failed: %s", self._job, record.id, error)
            return None
        await self._tell(record.id)
        releasing = asyncio.create_task(self._tell_end(record.id), name=f"{record.id}: release")
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        return Moved(record, placed, epoch, synced)

    async def _tell_end(self, transition: TransitionId) -> None:
        """Once the coordinator has released what the new plan has no use for, beside the job."""
        try:
            async with asyncio.timeout(self._timeouts[1]):
                while True:
                    await asyncio.sleep(POLL_SECONDS)
                    if (await self._registry.get_transition(self._job, transition)).value.state.ended:
                        break
            await self._tell(transition)
        except (NereusError, TimeoutError) as error:
            log.warning("job %s: whether transition %s is done is not known: %s", self._job, transition, error)

    async def _stand_still(self, record: TransitionRecord, stand_still: StandStill) -> None:
        """A transition before whose run the job cannot stand still is given up."""
        try:
            await stand_still(record)
        except NereusError:
            await self._coordinator().abort_transition(record, self._timeouts[1])
            raise

    async def _record(self, transition: TransitionId) -> TransitionRecord:
        return (await self._registry.get_transition(self._job, transition)).value

    async def _take_all(self) -> None:
        while True:
            asked = await self._queue.get()
            record = await self._record(asked.transition)
            self._free.clear()
            self._current = asked, record, asyncio.create_task(self._prepare(record), name=f"prepare {record.id}")
            self._begun.set()
            await self._free.wait()

    async def _prepare(self, record: TransitionRecord) -> bool:
        """Whether it may be run."""
        await self._tell(record.id)
        try:
            await self._coordinator().prepare_transition(record, self._timeouts[0])
        except NereusError as error:
            log.warning("job %s: transition %s was not prepared: %s", self._job, record.id, error)
            await self._end(record.id, error)
            await self._tell(record.id, error)
            return False
        await self._tell(record.id)
        return True

    async def _give_up(self) -> None:
        if self._releasing:
            _, late = await asyncio.wait(self._releasing, timeout=LAST_SECONDS)
            for task in late:
                task.cancel()
        ended = Conflict(f"job {self._job} ended before the transition ran", remedy="apply it while the job runs")
        if self._current is not None:
            _, record, preparing = self._current
            preparing.cancel()
            await asyncio.wait([preparing])
            try:
                await self._coordinator().abort_transition(record, self._timeouts[1])
            except NereusError as error:
                log.warning("job %s: transition %s was not aborted: %s", self._job, record.id, error)
            await self._end(record.id, ended)
        while not self._queue.empty():
            await self._end(self._queue.get_nowait().transition, ended)

    async def _end(self, transition: TransitionId, why: NereusError) -> None:
        """Write down that it did not happen. What a coordinator has begun it ends itself, or its next life does."""
        stored = await self._registry.get_transition(self._job, transition)
        if stored.value.state is TransitionState.PLANNED:
            undone = replace(
                stored.value,
                state=TransitionState.UNDONE,
                error_reason=why.reason,
                error_message=str(why),
                ended=self._clock(),
            )
            await self._registry.put_transition(undone, expected=stored.revision)

    async def _tell(self, transition: TransitionId, error: NereusError | None = None) -> TransitionState:
        """Returns the state that was told."""
        record = await self._record(transition)
        await self._emit("transition", told(record, error))
        return record.state


def told(record: TransitionRecord, error: NereusError | None = None) -> dict[str, Any]:
    """As events tell it."""
    nodes = dag_from_json(record.dag_json).nodes
    return {
        "transition_id": record.id,
        "state": str(record.state),
        "from_epoch": record.from_epoch,
        "epoch": record.from_epoch + record.state.committed,
        "step": record.step,
        "target_plan_id": record.target.id,
        "bytes_moved": record.bytes_moved,
        "bytes_needed": record.bytes_needed,
        "seconds": dict(record.seconds),
        "nodes": [
            {"id": node.id, "primitive": node.primitive, "model_stage": node.model_stage, "mode": node.mode}
            for node in nodes
        ],
        "reason": error.reason if error else record.error_reason,
        "message": str(error) if error else record.error_message,
    }
