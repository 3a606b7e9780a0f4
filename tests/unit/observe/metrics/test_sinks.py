"""A job's metrics reach every place it asks for, and no place can stop the job."""

from __future__ import annotations

import errno
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nereus.spec.options import MetricsSpec, WandbSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.observe.metrics import JobMetrics, MetricSinks, Values, open_sinks

pytestmark = pytest.mark.fast

STEP = {"step": 0, "loss": 0.5, "tokens": 4, "seconds": {"total": 2.0}, "sync": {"seconds": 0.5}}


@dataclass
class Kept:
    """A place in memory; `why`: what it raises instead."""

    why: Exception | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def write(self, step: int, values: Values, time: float) -> None:
        self._call("write", step, dict(values), time)

    def rewind(self, step: int, time: float) -> None:
        self._call("rewind", step, time)

    def close(self) -> None:
        self._call("close")

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.why is not None:
            raise self.why


def test_steps_evaluations_and_checkpoints_are_written_restarts_rewind_and_the_rest_is_ignored() -> None:
    kept = Kept()
    sinks = MetricSinks("a", {"kept": kept})
    sinks.event("step", STEP, 1.0)
    sinks.event("state", {"state": "running"}, 2.0)
    sinks.event("checkpoint", {"step": 1, "folder": "x", "seconds": 0.25}, 3.0)
    sinks.event("restart", {"from_step": 1}, 4.0)
    values = {"loss": 0.5, "tokens": 4, "seconds.total": 2.0, "sync.seconds": 0.5, "tokens_per_second": 2.0}
    assert kept.calls == [
        ("write", 0, values, 1.0),
        ("write", 1, {"checkpoint.step": 1.0, "checkpoint.seconds": 0.25}, 3.0),
        ("rewind", 1, 4.0),
    ]


def test_a_place_that_fails_is_told_once_and_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    full, kept = Kept(OSError(errno.ENOSPC, "No space left on device")), Kept()
    sinks = MetricSinks("a", {"full": full, "kept": kept})
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            sinks.event("step", {**STEP, "step": step}, 1.0)
        sinks.close()
    assert [call[0] for call in full.calls] == ["write", "close"]
    assert [call[0] for call in kept.calls] == ["write", "write", "write", "close"]
    assert [record.getMessage() for record in caplog.records] == [
        "metrics of job a go to full no longer: [Errno 28] No space left on device"
    ]


def test_a_bug_in_a_place_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        MetricSinks("a", {"broken": Kept(ZeroDivisionError())}).event("step", STEP, 1.0)


def test_a_full_disk_ends_the_files_and_not_the_series(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sinks = open_sinks(MetricsSpec(), tmp_path, "a", time=1.0, series=JobMetrics(registry))
    with caplog.at_level(logging.ERROR):
        sinks.event("step", STEP, 1.0)
    assert sinks.names == ("prometheus",)
    assert registry.get_sample_value("nereus_job_metric", {"job": "a", "name": "sync.seconds"}) == 0.5
    sinks.close()


def test_a_folder_that_cannot_be_written_leaves_the_other_places(tmp_path: Path) -> None:
    (tmp_path / "job").touch()
    sinks = open_sinks(
        MetricsSpec(tensorboard=True), tmp_path / "job", "a", time=1.0, series=JobMetrics(CollectorRegistry())
    )
    assert sinks.names == ("prometheus",)
    sinks.close()


def test_a_job_gets_the_places_that_its_file_names(tmp_path: Path) -> None:
    plain = open_sinks(MetricsSpec(), tmp_path / "plain", "a", time=1.0)
    both = open_sinks(MetricsSpec(tensorboard=True), tmp_path / "both", "b", time=1.0)
    assert (plain.names, both.names) == (("metrics.jsonl",), ("metrics.jsonl", "tensorboard"))
    for sinks in (plain, both):
        sinks.close()


def test_weights_and_biases_without_its_package_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InvalidInput, match="pip install wandb") as caught:
        open_sinks(MetricsSpec(wandb=WandbSpec(project="p")), tmp_path, "a", time=1.0)
    assert caught.value.details["field"] == "metrics.wandb"


class WandbError(Exception):
    """As `wandb.Error`: the root of what its client raises."""


@dataclass
class StandInRun:
    """A W&B run that remembers; it `fails` like the real one when the network is gone."""

    fails: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, row: dict[str, Any]) -> None:
        if self.fails:
            raise WandbError("connection reset")
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StandInRun:
    run = StandInRun()
    module: Any = ModuleType("wandb")
    module.Error, module.settings = WandbError, {}

    def init(**settings: Any) -> StandInRun:
        module.settings = settings
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return run


def test_weights_and_biases_gets_one_run_for_each_job_and_rows_with_their_step(run: StandInRun, tmp_path: Path) -> None:
    options = MetricsSpec(wandb=WandbSpec(project="p", mode="offline"))
    sinks = open_sinks(options, tmp_path, "a", time=1.0, config={"steps": 3})
    settings: dict[str, Any] = sys.modules["wandb"].settings
    assert (settings["id"], settings["resume"], settings["mode"]) == ("a", "allow", "offline")
    assert settings["config"] == {"steps": 3}
    sinks.event("step", {"step": 5, "rewards": {"exact_answer": 1.0}}, 1.0)
    sinks.close()
    assert (run.rows, run.finished) == ([{"step": 5, "rewards/exact_answer": 1.0}], True)


def test_weights_and_biases_out_of_reach_does_not_stop_the_job(run: StandInRun, tmp_path: Path) -> None:
    sinks = open_sinks(MetricsSpec(wandb=WandbSpec(project="p")), tmp_path, "a", time=1.0)
    run.fails = True
    sinks.event("step", STEP, 1.0)
    sinks.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5
