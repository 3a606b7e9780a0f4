"""The table of a transition's life."""

from __future__ import annotations

import pytest

from nereus_common.core.errors import IllegalTransition
from nereus_common.transitions.lifecycle import NEXT, TransitionState, advance

pytestmark = pytest.mark.fast
State = TransitionState


def test_it_goes_forward_one_state_at_a_time() -> None:
    way = [State.PLANNED, State.PREPARING, State.PREPARED, State.MOVING, State.COMMITTED, State.DONE]
    for number, state in enumerate(way[:-1]):
        assert advance(state, way[number + 1]) is way[number + 1]
        for later in way[number + 2 :]:
            with pytest.raises(IllegalTransition, match=f"is {state} cannot become {later}"):
                advance(state, later)


def test_before_the_commit_it_can_be_undone_or_lost_and_afterwards_never() -> None:
    for state in State:
        for end in (State.UNDONE, State.LOST):
            allowed = end in NEXT.get(state, ())
            assert allowed is not (state.committed or state.ended), (state, end)


def test_nothing_follows_an_end() -> None:
    assert not any(NEXT.get(state) for state in State if state.ended)


def test_to_stay_is_allowed() -> None:
    assert all(advance(state, state) is state for state in State)
