"""The life of a transition, as a table: what is not in it is refused.

PLANNED ──► PREPARING ──► PREPARED ──► MOVING ──► COMMITTED ──► DONE
   every phase before COMMITTED ──► UNDONE (the old plan is in force) | LOST (state is gone: back to a checkpoint)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from nereus_common.core.errors import IllegalTransition


class TransitionState(StrEnum):
    PLANNED = "planned"
    PREPARING = "preparing"
    PREPARED = "prepared"
    MOVING = "moving"
    COMMITTED = "committed"
    DONE = "done"
    UNDONE = "undone"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in (TransitionState.DONE, TransitionState.UNDONE, TransitionState.LOST)

    @property
    def committed(self) -> bool:
        """Whether the new plan is in force."""
        return self in (TransitionState.COMMITTED, TransitionState.DONE)


class NodeState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    UNDONE = "undone"


_BEFORE_COMMIT = (
    TransitionState.PLANNED,
    TransitionState.PREPARING,
    TransitionState.PREPARED,
    TransitionState.MOVING,
)
NEXT: Mapping[TransitionState, frozenset[TransitionState]] = {
    state: frozenset({following, TransitionState.UNDONE, TransitionState.LOST})
    for state, following in zip(_BEFORE_COMMIT, (*_BEFORE_COMMIT[1:], TransitionState.COMMITTED), strict=True)
} | {TransitionState.COMMITTED: frozenset({TransitionState.DONE})}


def advance(state: TransitionState, following: TransitionState) -> TransitionState:
    """`following`, or IllegalTransition where the table does not lead there from `state`. The same state is fine."""
    if following is not state and following not in NEXT.get(state, frozenset()):
        raise IllegalTransition(f"a transition that is {state} cannot become {following}")
    return following
