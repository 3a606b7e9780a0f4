"""Where the plan of a running job changes: between the last update of a step and its weight sync."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from nereus_common.core.errors import Unavailable
from nereus_common.core.plan import Plan
from nereus_common.registry import TransitionRecord
from nereus_common.rpc.together import together

from .autopilot import Autopilot
from .leaving import Leaving
from .loop import Replanned, Stages
from .moves import Moved, Mover
from .placed import PlacedJob
from .step import StepData
from .synced import Synced

Settle = Callable[[], Coroutine[Any, Any, None]]
Ask = Callable[[Plan, int], Awaitable[object]]
"""(target, version at whose boundary it is due): record a transition and hand it to the mover."""


class Replanning:
    """The loop's boundaries. `planned(version)`: the hand-written plan that is to be in force from that version on.

    `took` is told of the job under its new plan and returns its stages; `settle` returns once nothing is written from
    the old units; `retake` finds the job again when the coordinator has gone: None, it is as before, or else its new
    state.
    """

    def __init__(
        self,
        mover: Mover,
        planned: Callable[[int], Plan | None],
        ask: Ask,
        leaving: Leaving,
        *,
        settle: Settle,
        took: Callable[[PlacedJob, int, Plan], Stages],
        retake: Callable[[Unavailable], Awaitable[tuple[PlacedJob, int, Plan] | None]],
        autopilot: Autopilot | None = None,
    ) -> None:
        self._mover = mover
        self._planned = planned
        self._ask = ask
        self._leaving = leaving
        self._settle = settle
        self._took = took
        self._retake = retake
        self._autopilot = autopilot
        self._changed = False

    async def before_step(self, step: int) -> None:
        """A hand-written move that is due after this step is prepared while the step runs."""
        target = self._planned(step + 1)
        if target is not None:
            await self._ask(target, step + 1)

    async def cross(self, version: int) -> Replanned | None:
        async def stand_still(record: TransitionRecord) -> None:
            await together([self._leaving.empty(record.id, record.kept), self._settle()])

        try:
            due = self._planned(version) is not None
            moved = await self._mover.at_boundary(version, stand_still, due=due)
            replanned = None if moved is None else self._replanned(moved)
        except Unavailable as gone:
            found = await self._retake(gone)
            replanned = None if found is None else Replanned(self._took(*found), {})
        if replanned is None:
            await self._leaving.stay()
        self._changed = replanned is not None
        return replanned

    async def after_step(self, data: StepData, synced: Mapping[str, Synced]) -> None:
        if self._autopilot is not None:
            await self._autopilot.after_step(data, synced, changed=self._changed)

    def _replanned(self, moved: Moved) -> Replanned:
        stages = self._took(moved.placed, moved.epoch, moved.record.target)
        return Replanned(stages, {one.model: one for one in moved.synced})
