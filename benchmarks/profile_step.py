"""What one RL step spends its time on, and what limits it now.

Two looks at the work of `benchmarks.step`: phases of whole steps, from the events of a real job; and inside the update,
operators by their own time, from torch.profiler over one training rank. That rank runs in a process of its own, on
its half of a step's batch (the job's real prompts, responses of the lengths just seen) with its half of the cores. It
has no other rank to wait for, so collectives are not in the second look.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import cluster, run_job
from benchmarks.step import SPEC
from benchmarks.tiny import tiny_job
from nereus.cluster.config import default_data_dir
from nereus.events import StepReport
from nereus.models import with_local_models
from nereus.spec import JobSpec
from nereus_common.core.errors import ProcessLost

WARM_UP = 2
MEASURED = 3
RANK_SECONDS = 900.0


def run(*, tiny: bool = False) -> dict[str, Any]:
    spec = {**SPEC, "name": "bench-profile", "steps": WARM_UP + MEASURED}
    with tiny_job(spec) if tiny else contextlib.nullcontext(spec) as chosen:
        job = with_local_models(JobSpec.from_dict(chosen, "profile"), default_data_dir() / "demo" / "models")
        reports = _steps(job)[1 if tiny else WARM_UP :]
        rank = _rank(job, statistics.mean(report.response_length_mean for report in reports))
    seconds = _medians([report.seconds for report in reports])
    inside = _medians([report.training_seconds for report in reports])
    found = {
        "seconds": seconds,
        "training_seconds": inside,
        "sync_seconds": _medians([report.sync.get("phases", {}) for report in reports]),
        "operators": rank["operators"],
        "rank_seconds": rank["seconds"],
        "limits": limits(seconds, inside, rank["operators"]),
    }
    _show(found)
    return found


def limits(
    seconds: Mapping[str, float], training: Mapping[str, float], operators: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What limits a step now: its longest phase, the longest part of the update, the operators that fill most of it."""
    phases = {name: value for name, value in seconds.items() if name != "total"}
    phase = max(phases, key=phases.__getitem__)
    part = max(training, key=training.__getitem__)
    first = ", ".join(f"{one['name']} {one['share']:.0%}" for one in operators[:3])
    return [
        f"step: {phase} takes {phases[phase] / seconds['total']:.0%} of {seconds['total']:.2f} s",
        f"update: {part} takes {training[part] / sum(training.values()):.0%} of {sum(training.values()):.2f} s",
        f"rank: {first} of its operators' own time",
    ]


def _steps(job: JobSpec) -> list[StepReport]:
    with cluster(devices=4) as (state, _):
        return [event.value for event in run_job(state, job) if isinstance(event.value, StepReport)]


def _medians(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in several) for name in several[0]}


def _rank(job: JobSpec, response_length: float) -> dict[str, Any]:
    """The profile that `benchmarks.profile_rank` makes; ProcessLost when its process fails."""
    with TemporaryDirectory(prefix="nereus-profile-") as path:
        (folder := Path(path)).joinpath("job.json").write_text(job.to_json())
        files = [str(folder / "job.json"), str(folder / "result.json")]
        command = [sys.executable, "-m", "benchmarks.profile_rank", *files, str(response_length)]
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=RANK_SECONDS, check=False
        )
        if done.returncode:
            raise ProcessLost(f"the profiled rank ended with {done.returncode}: {done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result


def _show(found: Mapping[str, Any]) -> None:
    """A short table on stderr: stdout is the JSON's."""
    console = Console(stderr=True)
    phases = Table("phase", "seconds", title="One step", title_justify="left")
    for name, value in {
        **found["seconds"],
        **{f"training: {n}": v for n, v in found["training_seconds"].items()},
    }.items():
        phases.add_row(name, f"{value:.3f}")
    operators = Table("operator", "own seconds", "share", "calls", title="One rank's update", title_justify="left")
    for one in found["operators"]:
        operators.add_row(one["name"], f"{one['self_seconds']:.3f}", f"{one['share']:.1%}", str(one["calls"]))
    console.print(phases, operators, *found["limits"], sep="\n")
