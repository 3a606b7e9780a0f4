"""The life of an Elastic Model Unit: one complete replica of a model-stage.

    PREPARING ──► PREPARED ──► LOADING ──► LOADED ──► ACTIVE ──► ASLEEP ──► PREPARED
                                  ▲           ▲          │
                                  └───────────┴── UPDATING (a new version is being pulled)
                                                ACTIVE ◄──► OFFERING ──► DRAINED (parts of its state are gone)
    PREPARED, LOADING, LOADED ──► DRAINED (a unit that never served offers the parts it has)
    DRAINED ──► LOADING (its gaps are filled by pulling)
    every phase but RELEASED and LOST ──► RELEASED | LOST

The table is the design: what is not in it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nereus_common.core.errors import IllegalTransition, StaleEpoch
from nereus_common.core.ids import DeviceId, JobId, ModelStage, UnitId
from nereus_common.core.layout import Layout


class Phase(StrEnum):
    PREPARING = "preparing"
    PREPARED = "prepared"
    LOADING = "loading"
    LOADED = "loaded"
    ACTIVE = "active"
    UPDATING = "updating"
    ASLEEP = "asleep"
    OFFERING = "offering"
    DRAINED = "drained"
    RELEASED = "released"
    LOST = "lost"


class Event(StrEnum):
    PREPARED = "prepared"
    """Processes, engine and empty storage exist on every rank."""
    LOAD_STARTED = "load_started"
    LOADED = "loaded"
    """Every rank holds the bytes of the version, staged or applied, and their digest is right."""
    LOAD_FAILED = "load_failed"
    COMMITTED = "committed"
    """The registry names this version as the unit's; it may serve."""
    UPDATE_STARTED = "update_started"
    UPDATED = "updated"
    UPDATE_FAILED = "update_failed"
    SLEPT = "slept"
    WOKEN = "woken"
    OFFERED = "offered"
    """Other units may read its whole state, which nothing changes meanwhile."""
    WITHDRAWN = "withdrawn"
    DROPPED = "dropped"
    """Storage of some tensors is free; other units hold them."""
    RELEASED = "released"
    LOST = "lost"


NEXT: dict[tuple[Phase, Event], Phase] = {
    (Phase.PREPARING, Event.PREPARED): Phase.PREPARED,
    (Phase.PREPARED, Event.LOAD_STARTED): Phase.LOADING,
    (Phase.LOADING, Event.LOADED): Phase.LOADED,
    (Phase.LOADING, Event.LOAD_FAILED): Phase.PREPARED,
    (Phase.LOADED, Event.COMMITTED): Phase.ACTIVE,
    (Phase.LOADED, Event.LOAD_STARTED): Phase.LOADING,  # whoever had loaded it was killed before it committed
    (Phase.ACTIVE, Event.UPDATE_STARTED): Phase.UPDATING,
    (Phase.UPDATING, Event.UPDATED): Phase.LOADED,
    (Phase.UPDATING, Event.UPDATE_FAILED): Phase.ACTIVE,
    (Phase.ACTIVE, Event.SLEPT): Phase.ASLEEP,
    (Phase.ASLEEP, Event.WOKEN): Phase.PREPARED,  # what it held is gone: it serves nothing until it is filled again
    (Phase.ACTIVE, Event.OFFERED): Phase.OFFERING,
    (Phase.OFFERING, Event.WITHDRAWN): Phase.ACTIVE,
    (Phase.OFFERING, Event.DROPPED): Phase.DRAINED,
    (Phase.DRAINED, Event.DROPPED): Phase.DRAINED,
    (Phase.PREPARED, Event.OFFERED): Phase.DRAINED,
    (Phase.LOADING, Event.OFFERED): Phase.DRAINED,
    (Phase.LOADED, Event.OFFERED): Phase.DRAINED,
    (Phase.DRAINED, Event.LOAD_STARTED): Phase.LOADING,
} | {
    (phase, end): Phase(end.value)
    for phase in Phase
    if phase not in (Phase.RELEASED, Phase.LOST)
    for end in (Event.RELEASED, Event.LOST)
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What the registry knows of a unit. `epoch`: the plan epoch it belongs to; `version`: of the state it serves."""

    id: UnitId
    job: JobId
    model_stage: ModelStage
    replica: int
    layout: Layout
    devices: tuple[DeviceId, ...]
    epoch: int
    phase: Phase = Phase.PREPARING
    version: int = -1


def step(unit: Unit, event: Event, *, epoch: int, version: int | None = None) -> Unit:
    """Apply one event, or raise StaleEpoch / IllegalTransition. `version` is taken with COMMITTED only."""
    if epoch != unit.epoch:
        raise StaleEpoch(
            f"unit {unit.id} is at epoch {unit.epoch}, the event {event} is of epoch {epoch}",
            unit=unit.id,
            epoch=unit.epoch,
        )
    phase = NEXT.get((unit.phase, event))
    if phase is None:
        raise IllegalTransition(f"unit {unit.id} is {unit.phase}: {event} is not allowed", unit=unit.id)
    if event is Event.COMMITTED:
        if version is None or version < unit.version:
            raise IllegalTransition(f"unit {unit.id} serves version {unit.version}, cannot commit {version}")
        return replace(unit, phase=phase, version=version)
    return replace(unit, phase=phase)
