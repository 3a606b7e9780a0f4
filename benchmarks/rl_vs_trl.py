"""RL steps per hour against TRL: the same job on the same machine in one run, one system after the other.

Work: that of `benchmarks.step`. Peers: TRL 1.16's GRPOTrainer, its set-ups frozen in `benchmarks/peers`: `trl_bf16` as
a user would write it, `trl_best` at the best that its options allow on a CPU. Prompts and their order, batch, lengths,
rewards and optimizer come from our job for all; responses are sampled, so each side has its own.

A step is measured from the end of the one before to its own end, on both sides.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.cluster import cluster, run_job
from benchmarks.pace import Pace, step_ends
from benchmarks.peers.trl import run_trl
from benchmarks.step import SPEC
from benchmarks.tiny import tiny_job
from nereus.cluster.config import default_data_dir
from nereus.events import StepReport
from nereus.models import with_local_models
from nereus.spec import JobSpec

WARM_UP = 2
MEASURED = 4
PEERS = {"trl": "trl_bf16", "trl_best": "trl_best"}


def run(*, tiny: bool = False) -> dict[str, Any]:
    with _job(tiny) as job:
        warm_up = 1 if tiny else WARM_UP
        found = {"nereus": _nereus(job)} | {name: run_trl(setup, job) for name, setup in PEERS.items()}
        pace = {name: Pace.between(one["ends"], warm_up) for name, one in found.items()}
    speed = {name: one.steps_per_hour for name, one in pace.items()}
    return {
        "steps_per_hour": speed,
        "ratio": speed["nereus"] / speed["trl"],
        "ratio_best": speed["nereus"] / speed["trl_best"],
        "steps_per_hour_spread": {name: one.spread for name, one in pace.items()},
        "steps_measured": {name: len(one.seconds) for name, one in pace.items()},
        "response_length_mean": {name: _mean(one, "response_length_mean", warm_up) for name, one in found.items()},
        "reward_mean": {name: _mean(one, "reward_mean", warm_up) for name, one in found.items()},
        "peer_memory_bytes": {name: found[name]["peak_memory_bytes"] for name in PEERS},
        "peer_versions": found["trl"]["versions"],
    }


@contextlib.contextmanager
def _job(tiny: bool) -> Iterator[JobSpec]:
    """The job with its model as a folder, which every side can read."""
    spec = {**SPEC, "name": "bench-rl-vs-trl", "steps": WARM_UP + MEASURED}
    with tiny_job(spec) if tiny else contextlib.nullcontext(spec) as chosen:
        yield with_local_models(JobSpec.from_dict(chosen, "rl-vs-trl"), default_data_dir() / "demo" / "models")


def _nereus(job: JobSpec) -> dict[str, Any]:
    with cluster(devices=4) as (state, _):
        events = run_job(state, job)
    reports = [event.value for event in events if isinstance(event.value, StepReport)]
    return {
        "ends": step_ends(events),
        "reward_mean": [report.reward_mean for report in reports],
        "response_length_mean": [report.response_length_mean for report in reports],
    }


def _mean(found: dict[str, Any], name: str, warm_up: int) -> float:
    values: list[float] = found[name][warm_up:]
    return statistics.mean(values)
