"""A job that watches its own plan: it says what it would do, or does it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nereus.events import JobEvent, JobState, PlanDecision, StepReport, TransitionChange
from nereus.sync import SyncClient
from tests.system.job_specs import job_spec

pytestmark = pytest.mark.timeout(600)
CLUMSY = "tp1.pp2.fs2"
"""Four ranks for a tiny model, on cores that they share."""


def spec(name: str, model: Path, mode: str, **more: Any) -> dict[str, Any]:
    given = {"engine": "transformers", "training": CLUMSY, "evaluation": {"size": 0}, "rollouts": {"samples": 0}}
    return job_spec(name, model, adapt={"mode": mode, "gamma": 1.0}, **{**given, **more})


def decisions(events: Iterable[JobEvent]) -> list[PlanDecision]:
    return [event.value for event in events if isinstance(event.value, PlanDecision)]


def ledger(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "ledger.jsonl").read_text().splitlines()]


def test_a_dry_run_says_which_plan_it_would_take_and_why_and_moves_nothing(
    client: SyncClient, tiny_model: Path
) -> None:
    job = client.submit(spec("dry", tiny_model, "dry-run", steps=24))
    events = list(job.watch())
    ended = job.get().check()
    first = decisions(events)[0]
    assert first.plan_id and not first.transition_id and first.step_seconds
    verdicts = [target["verdict"] for target in first.targets]
    assert verdicts and set(verdicts) <= {
        "taken",
        "not needed",
        "saves nothing",
        "too dear",
        "too slow",
        "unreachable",
    }
    assert not any(isinstance(event.value, TransitionChange) for event in events)
    assert ended.epoch == 1
    lines = ledger(ended.folder)
    measured = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in measured] == list(range(24))
    assert all({"rollouts", "update actor", "sync"} <= line["measured"].keys() for line in measured)
    assert [line["step"] for line in lines if line["kind"] == "decision"] == [one.step for one in decisions(events)]
    late = measured[12:]
    for line in late:
        named = line["predicted"]
        assert all(named[task] > 0 for task in ("rollouts", "update actor", "sync"))


def test_a_job_leaves_a_clumsy_plan_by_itself_and_goes_on(client: SyncClient, tiny_model: Path) -> None:
    job = client.submit(spec("self", tiny_model, "auto", steps=80))
    events = list(job.watch())
    assert job.get().check().state is JobState.SUCCEEDED
    taken = [one for one in decisions(events) if one.transition_id]
    assert taken, [(one.step, [target["verdict"] for target in one.targets]) for one in decisions(events)]
    moved = [e.value for e in events if isinstance(e.value, TransitionChange) and e.value.state == "done"]
    assert moved and moved[0].target_plan_id == taken[0].taken
    assert {change.target_plan_id for change in moved} <= {one.taken for one in taken}
    steps = [event.value.step for event in events if isinstance(event.value, StepReport)]
    assert steps == list(range(80))


def test_a_pinned_model_stage_is_left_alone(client: SyncClient, tiny_model: Path) -> None:
    more = {"adapt": {"mode": "auto", "gamma": 1.0, "pin": ["actor/training"]}}
    given = {**spec("pinned", tiny_model, "auto", steps=30), **more}
    job = client.submit(given)
    events = list(job.watch())
    ended = job.get().check()
    assert decisions(events)
    for one in decisions(events):
        for target in one.targets:
            assert target["plan"]["stages"]["actor/training"]["layout"] == CLUMSY
    assert ended.plan is not None and str(ended.plan.stages[1][1]) == CLUMSY
