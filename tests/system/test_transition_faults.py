"""A transition that fails before its commit leaves the job as it was; one whose coordinator dies is undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.events import JobEvent, Restart, StepReport
from nereus.sync import SyncClient, SyncJobHandle
from nereus.transition import Transition
from nereus_common.core.errors import InvalidPlan
from nereus_common.transitions.lifecycle import TransitionState
from tests.system.test_resume import kill
from tests.system.test_transitions import GRPO, spec_of, stage, units_of
from tests.system.workers_of_jobs import worker_pid

pytestmark = pytest.mark.timeout(420)
Own = tuple[ClusterFolder, ClusterConfig, ClusterState]


def steps_after(job: SyncJobHandle, after: str, count: int) -> tuple[list[JobEvent], str]:
    """Events after a revision up to the `count`-th step, and the revision of the last."""
    seen: list[JobEvent] = []
    for event in job.watch(after=after):
        seen.append(event)
        count -= isinstance(event.value, StepReport)
        if not count:
            return seen, event.revision
    raise AssertionError(f"the job ended before: {job.get()}")


def until(job: SyncJobHandle, transition: str, wanted: Callable[[Transition], bool]) -> Transition:
    for seen in job.follow_transition(transition):
        if wanted(seen):
            return seen
    raise AssertionError(f"it never came to that: {job.transition(transition)}")


def test_a_target_that_the_model_cannot_have_is_refused_before_anything_is_begun(own: Own, tiny_model: Path) -> None:
    _, _, state = own
    with SyncClient.connect(state.controller) as client:
        job = client.submit(spec_of("refused", tiny_model, GRPO, steps=400))
        _, revision = steps_after(job, "", 2)
        units, plan = units_of(client), job.get().plan
        with pytest.raises(InvalidPlan, match="tp3"):
            job.apply_transition({"stages": {"actor/training": stage("tp3.pp1.fs1", 1, 2, 3)}})
        assert job.transitions() == ()
        steps_after(job, revision, 2)
        assert job.get().plan == plan and units_of(client) == units
        job.cancel()


def test_new_units_that_do_not_start_are_undone_and_the_job_goes_on(own: Own, tiny_model: Path) -> None:
    """One of them is killed while it starts."""
    _, _, state = own
    with SyncClient.connect(state.controller) as client:
        job = client.submit(spec_of("stillborn", tiny_model, GRPO, steps=2000))
        _, revision = steps_after(job, "", 2)
        units, plan = units_of(client), job.get().plan
        begun = job.apply_transition({"stages": {"actor/training": stage("tp1.pp2.fs1", 2, 3)}})
        os.kill(worker_pid(state, f"{job.id}.actor.training.e2", "training"), signal.SIGKILL)
        ended = until(job, begun.id, lambda seen: seen.has_ended)
        assert (ended.state, ended.error_reason) == (TransitionState.UNDONE, "PROCESS_LOST")
        events, _ = steps_after(job, revision, 3)
        assert not any(isinstance(event.value, Restart) for event in events)
        assert job.get().plan == plan and units_of(client) == units
        job.cancel()


def test_a_job_outlives_its_coordinator_and_what_that_had_begun_is_undone(own: Own, tiny_model: Path) -> None:
    folder, config, state = own
    with SyncClient.connect(state.controller) as client:
        job = client.submit(spec_of("orphan", tiny_model, GRPO, steps=2000))
        _, revision = steps_after(job, "", 2)
        units = units_of(client)
        begun = job.apply_transition({"stages": {"actor/training": stage("tp1.pp2.fs1", 2, 3)}})
        until(job, begun.id, lambda seen: seen.state is TransitionState.PREPARING)
        kill(state, "coordinator")
        up(folder, config)
        assert until(job, begun.id, lambda seen: seen.has_ended).state is TransitionState.UNDONE
        events, revision = steps_after(job, revision, 3)
        assert units_of(client) == units
        again = job.apply_transition({"stages": {"actor/training": stage("tp1.pp2.fs1", 2, 3)}})
        assert until(job, again.id, lambda seen: seen.has_ended).state is TransitionState.DONE
        more, _ = steps_after(job, revision, 2)
        assert not any(isinstance(event.value, Restart) for event in (*events, *more))
        job.cancel()
        assert units_of(client) == set()
