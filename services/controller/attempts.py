"""What follows when an attempt at a job has failed: pure decisions, from values to values.

A job runs as a sequence of attempts. Each has a plan epoch of its own, units of its own and a place to start from, so
whatever still runs of an earlier one is fenced off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nereus.spec.options import CheckpointSpec
from nereus_common.core.errors import (
    Conflict,
    DeadlineExceeded,
    IllegalTransition,
    InvalidInput,
    JobFailed,
    NereusError,
    NotFound,
    ProcessLost,
    ResourceExhausted,
    Unavailable,
    VerificationFailed,
)
from nereus_common.core.ids import JobId

from .progress import Progress

CURED_BY_A_RESTART: Mapping[type[NereusError], bool] = {
    ProcessLost: True,  # another process can take its place
    Unavailable: True,  # whoever is gone may be back, or somebody else in its place
    DeadlineExceeded: True,  # a stuck rank goes with its attempt; what is merely too slow uses the attempts up
    InvalidInput: False,  # the next attempt would be told the same; so for plans and engines, which are kinds of it
    NotFound: False,  # a model or file that is not there (a lost unit arrives here as ProcessLost)
    Conflict: False,  # somebody else has taken the job over, or the units' names; also StaleEpoch, StaleVersion
    IllegalTransition: False,  # a fault of ours
    ResourceExhausted: False,  # the same plan needs the same memory again: another plan is needed
    VerificationFailed: False,  # state arrived damaged: somebody has to look before it is trusted again
    JobFailed: False,  # the job's own rules, or its own code, stopped it
    NereusError: False,  # a fault of ours
}
"""By kind of error; a kind that is not listed follows the nearest above it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where an attempt begins. `checkpoint`: the folder of a complete one, or None: from the model folders, or with
    `copies` from the copies that the attempt before has left."""

    progress: Progress = field(default_factory=Progress)
    checkpoint: Path | None = None
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """A job between two attempts. `steps_done` counts its finished steps, `fruitless` the restarts since the last new
    checkpoint; `newest` is that checkpoint; `copies`: where it stood when copies of its state were left."""

    job: JobId
    steps_done: int
    fruitless: int
    newest: Start | None
    copies: Progress | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job ends; `remedy` says what its user can do, or is empty where the error says it already."""

    remedy: str = ""


def after_failure(error: NereusError, options: CheckpointSpec, standing: Standing) -> Start | GiveUp:
    """Where the next attempt starts, or why there is none.

    From the beginning only a job goes that has not finished a step: it loses nothing by it. From copies it goes
    whenever there are some, also where a checkpoint is to be resumed by hand: they are gone with the job.
    """
    if not is_cured_by_a_restart(error):
        return GiveUp()
    if standing.copies is not None and standing.fruitless < options.attempts:
        return Start(standing.copies, copies=True)
    if options.resume == "manual":
        return GiveUp(_by_hand(standing))
    if standing.fruitless >= options.attempts:
        return GiveUp(
            f"it was restarted {standing.fruitless} times without a new checkpoint; see why, then {_by_hand(standing)}"
        )
    if standing.newest is not None:
        return standing.newest
    if standing.steps_done == 0:
        return Start()
    return GiveUp(
        f"{standing.steps_done} steps are lost with it, because there is no checkpoint: set checkpoint.every, and "
        "submit the job again under another name"
    )


def is_cured_by_a_restart(error: NereusError) -> bool:
    """By the table; every error has an entry, because their root has one."""
    return next(CURED_BY_A_RESTART[kind] for kind in type(error).__mro__ if kind in CURED_BY_A_RESTART)


def _by_hand(standing: Standing) -> str:
    if standing.newest is not None:
        step = standing.newest.progress.step
        return f"`nereus job resume {standing.job}` runs it on from its checkpoint after {step} steps"
    return "submit it again under another name; with checkpoint.every a later one can be resumed"
