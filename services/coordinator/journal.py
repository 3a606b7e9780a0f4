"""The journal of one transition: every change of its record is durable before it is acted on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus_common.core.errors import NereusError
from nereus_common.core.ids import UnitId
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.registry import TransitionRecord, Versioned
from nereus_common.transitions.lifecycle import NodeState, TransitionState, advance

from .ledger import UnitLedger


class TransitionJournal:
    """Reads and writes one TransitionRecord by compare-and-set. `clock`: seconds since the Unix epoch."""

    def __init__(
        self, ledger: UnitLedger, stored: Versioned[TransitionRecord], clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger = ledger
        self._stored = stored
        self._clock = clock
        self.watch = Stopwatch(stored.value.seconds)
        """Its seconds are written with the next change."""
        self._writing = asyncio.Lock()

    @property
    def record(self) -> TransitionRecord:
        return self._stored.value

    async def become(self, state: TransitionState, **changes: Any) -> None:
        """IllegalTransition where the life of a transition does not lead there."""
        if state.ended:
            changes.setdefault("ended", self._clock())
        await self._write(lambda record: replace(record, state=advance(record.state, state), **changes))

    async def failed(self, state: TransitionState, error: NereusError) -> None:
        """It ends as UNDONE or LOST because of `error`."""
        await self.become(state, error_reason=error.reason, error_message=str(error))

    async def begin(self, dag_json: str, nodes: int, units: Sequence[UnitId], kept: Sequence[UnitId]) -> None:
        """What is to be done, before any of it is: `units` come to be, `kept` stay."""
        waiting = (NodeState.WAITING,) * nodes
        changes = {"dag_json": dag_json, "nodes": waiting, "units": tuple(units), "kept": tuple(kept)}
        await self.become(TransitionState.PREPARING, **changes)

    async def nodes(self, numbers: Collection[int], state: NodeState) -> None:
        """These nodes have come to `state`."""
        await self._write(
            lambda record: replace(
                record, nodes=tuple(state if node in numbers else was for node, was in enumerate(record.nodes))
            )
        )

    async def holds(self, node: int, digests: Mapping[str, int]) -> None:
        """What the old units of an in-place node hold, before its first round: with it a move is reversed."""
        await self._write(lambda record: replace(record, digests={**record.digests, node: dict(digests)}))

    async def round_done(self, node: int, number: int) -> None:
        """Round `number` of an in-place node is complete: what it replaced may go."""
        await self._write(lambda record: replace(record, rounds={**record.rounds, node: number + 1}))

    async def moved(self, moved: int, needed: int) -> None:
        """Add to the bytes that were counted at the transport, and to those that were needed."""
        await self._write(
            lambda record: replace(
                record, bytes_moved=record.bytes_moved + moved, bytes_needed=record.bytes_needed + needed
            )
        )

    async def _write(self, change: Callable[[TransitionRecord], TransitionRecord]) -> None:
        async with self._writing:
            changed = replace(change(self.record), seconds=dict(self.watch.seconds))
            revision = await self._ledger.registry.put_transition(
                changed, expected=self._stored.revision, fence=self._ledger.fence
            )
            self._stored = Versioned(changed, revision)
