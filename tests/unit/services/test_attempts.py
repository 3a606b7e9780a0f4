"""What follows a failed attempt, case by case; and that every kind of error has been thought about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nereus_controller.attempts import (
    CURED_BY_A_RESTART,
    GiveUp,
    Standing,
    Start,
    after_failure,
    is_cured_by_a_restart,
)
from nereus_controller.progress import Progress

from nereus.spec.options import CheckpointSpec
from nereus_common.core.errors import (
    DeadlineExceeded,
    InvalidPlan,
    JobFailed,
    NereusError,
    NotFound,
    ProcessLost,
    ResourceExhausted,
    StaleEpoch,
    Unavailable,
    UnsupportedByEngine,
    VerificationFailed,
    error_kinds,
)
from nereus_common.core.ids import JobId

pytestmark = pytest.mark.fast

SAVED = Start(Progress(4, 32), Path("/jobs/j/checkpoints/step-00000004"))
AUTO = CheckpointSpec(every=2, resume="auto", attempts=3)
MANUAL = CheckpointSpec(every=2)


def standing(*, steps_done: int = 5, fruitless: int = 0, newest: Start | None = SAVED) -> Standing:
    return Standing(JobId("j"), steps_done, fruitless, newest)


@pytest.mark.parametrize("kind", [ProcessLost, Unavailable, DeadlineExceeded])
def test_what_another_process_or_another_moment_cures_is_tried_again(kind: type[NereusError]) -> None:
    assert after_failure(kind("gone"), AUTO, standing()) == SAVED


@pytest.mark.parametrize(
    "kind", [InvalidPlan, UnsupportedByEngine, NotFound, StaleEpoch, ResourceExhausted, VerificationFailed, JobFailed]
)
def test_what_would_fail_again_or_has_to_be_looked_at_ends_the_job(kind: type[NereusError]) -> None:
    assert after_failure(kind("no"), AUTO, standing()) == GiveUp()


def test_a_fault_of_ours_ends_the_job() -> None:
    assert not is_cured_by_a_restart(NereusError("a bug"))


def test_every_kind_of_error_is_in_the_table_or_below_one_that_is() -> None:
    for kind in error_kinds().values():
        listed = [above for above in kind.__mro__ if above in CURED_BY_A_RESTART]
        assert listed and (listed[0] is not NereusError or kind is NereusError), kind


def test_a_job_without_a_finished_step_starts_from_the_beginning() -> None:
    assert after_failure(ProcessLost("gone"), AUTO, standing(steps_done=0, newest=None)) == Start()


def test_finished_steps_are_never_thrown_away_in_silence() -> None:
    verdict = after_failure(ProcessLost("gone"), AUTO, standing(newest=None))
    assert isinstance(verdict, GiveUp)
    assert "5 steps are lost" in verdict.remedy and "checkpoint.every" in verdict.remedy


@pytest.mark.parametrize(("fruitless", "goes_on"), [(0, True), (2, True), (3, False), (4, False)])
def test_restarts_without_a_new_checkpoint_are_bounded(fruitless: int, goes_on: bool) -> None:
    verdict = after_failure(ProcessLost("gone"), AUTO, standing(fruitless=fruitless))
    assert (verdict == SAVED) is goes_on
    if isinstance(verdict, GiveUp):
        assert "`nereus job resume j`" in verdict.remedy


@pytest.mark.parametrize(
    ("newest", "said"), [(SAVED, "`nereus job resume j` runs it on from its checkpoint after 4"), (None, "submit it")]
)
def test_a_job_that_waits_for_its_user_says_what_to_run(newest: Start | None, said: str) -> None:
    verdict = after_failure(ProcessLost("gone"), MANUAL, standing(newest=newest))
    assert isinstance(verdict, GiveUp) and said in verdict.remedy


@pytest.mark.parametrize("options", [AUTO, MANUAL])
def test_copies_are_nearer_than_any_checkpoint_and_are_used_unasked(options: CheckpointSpec) -> None:
    left = replace(standing(), copies=Progress(5, 40))
    assert after_failure(ProcessLost("gone"), options, left) == Start(Progress(5, 40), copies=True)
    assert after_failure(JobFailed("its own fault"), options, left) == GiveUp()


def test_a_job_that_dies_again_and_again_without_a_new_step_ends() -> None:
    left = replace(standing(fruitless=3), copies=Progress(5, 40))
    assert isinstance(after_failure(ProcessLost("gone"), AUTO, left), GiveUp)
