from __future__ import annotations

from itertools import product

import pytest

from nereus_common.core.emu import NEXT, Event, Phase, Unit, step
from nereus_common.core.errors import IllegalTransition, StaleEpoch
from nereus_common.core.ids import DeviceId, JobId, ModelStage, Stage, UnitId
from nereus_common.core.layout import Layout

pytestmark = pytest.mark.fast

ENDS = {Phase.RELEASED, Phase.LOST}


def unit(phase: Phase = Phase.PREPARING, version: int = -1) -> Unit:
    device = (DeviceId("node0", "cpu0"),)
    return Unit(UnitId("u"), JobId("j"), ModelStage("actor", Stage.TRAINING), 0, Layout(), device, 3, phase, version)


def apply(now: Unit, *events: Event, version: int = 0) -> Unit:
    for event in events:
        now = step(now, event, epoch=3, version=version)
    return now


def test_every_phase_can_be_reached_from_the_first() -> None:
    reached, edge = {Phase.PREPARING}, {Phase.PREPARING}
    while edge:
        edge = {to for (phase, _), to in NEXT.items() if phase in edge} - reached
        reached |= edge
    assert reached == set(Phase)


def test_every_event_is_used_and_every_living_phase_can_end() -> None:
    assert {event for _, event in NEXT} == set(Event)
    for phase in set(Phase) - ENDS:
        assert NEXT[phase, Event.RELEASED] is Phase.RELEASED
        assert NEXT[phase, Event.LOST] is Phase.LOST
    assert not any(phase in ENDS for phase, _ in NEXT)


@pytest.mark.parametrize(("phase", "event"), sorted(product(Phase, Event)))
def test_what_the_table_does_not_allow_is_refused(phase: Phase, event: Event) -> None:
    now = unit(phase)
    if (phase, event) in NEXT:
        after = step(now, event, epoch=3, version=0)
        assert after.phase is NEXT[phase, event]
        assert (after.version == 0) == (event is Event.COMMITTED)
        return
    with pytest.raises(IllegalTransition, match=f"{phase}: {event} is not allowed") as caught:
        step(now, event, epoch=3, version=0)
    assert caught.value.details["unit"] == "u"


def test_a_unit_lives_through_load_update_and_sleep() -> None:
    active = apply(unit(), Event.PREPARED, Event.LOAD_STARTED, Event.LOADED, Event.COMMITTED)
    assert (active.phase, active.version) == (Phase.ACTIVE, 0)
    updated = apply(active, Event.UPDATE_STARTED, Event.UPDATED, Event.COMMITTED, version=1)
    assert (updated.phase, updated.version) == (Phase.ACTIVE, 1)
    woken = apply(updated, Event.SLEPT, Event.WOKEN)
    assert woken.phase is Phase.PREPARED
    assert apply(woken, Event.LOAD_STARTED, Event.LOADED, Event.COMMITTED, version=1) == updated


@pytest.mark.parametrize("phase", [Phase.ASLEEP, Phase.PREPARED])
def test_a_unit_that_slept_serves_nothing_before_it_is_filled_again(phase: Phase) -> None:
    """Whatever happens next, the way back to work leads through a load."""
    reachable, seen = [phase], set[Phase]()
    while reachable:
        now = reachable.pop()
        seen.add(now)
        following = {to for (at, event), to in NEXT.items() if at is now and event is not Event.LOAD_STARTED}
        reachable += following - seen
    assert not seen & {Phase.ACTIVE, Phase.UPDATING}


def test_a_failed_update_leaves_the_old_version_serving_and_a_failed_load_nothing() -> None:
    active = unit(Phase.ACTIVE, version=4)
    assert apply(active, Event.UPDATE_STARTED, Event.UPDATE_FAILED) == active
    assert apply(unit(Phase.LOADING), Event.LOAD_FAILED).phase is Phase.PREPARED


@pytest.mark.parametrize("epoch", [2, 4])
@pytest.mark.parametrize("event", list(Event))
def test_an_event_of_another_epoch_is_refused_in_every_phase(event: Event, epoch: int) -> None:
    for phase in Phase:
        with pytest.raises(StaleEpoch, match=f"at epoch 3.*of epoch {epoch}"):
            step(unit(phase), event, epoch=epoch, version=0)


@pytest.mark.parametrize("version", [None, 6])
def test_a_commit_never_goes_back_in_version(version: int | None) -> None:
    with pytest.raises(IllegalTransition, match=f"version 7, cannot commit {version}"):
        step(unit(Phase.LOADED, version=7), Event.COMMITTED, epoch=3, version=version)
