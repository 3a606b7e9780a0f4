"""RL steps per hour with generation and training side by side, against the same job taking turns on the same devices.

Work: that of `benchmarks.step`, generation on devices of its own in both. The peer is our own synchronous loop; the
limit is the slower of the two stages. `max_staleness_seen` ≤ `eta` is the promise that must hold at any speed.
"""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.cluster import cluster, run_job
from benchmarks.pace import Pace, step_ends
from benchmarks.step import SPEC
from benchmarks.tiny import tiny_job
from nereus.events import JobEvent, StepReport

WARM_UP = 2
MEASURED = 6
ETA = 1
MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"asynchronous": {"staleness": ETA}}}


def run(*, tiny: bool = False) -> dict[str, Any]:
    spec = {**SPEC, "steps": WARM_UP + MEASURED}
    with tiny_job(spec) if tiny else contextlib.nullcontext(spec) as job, cluster(devices=4) as (state, _):
        found = {mode: run_job(state, {**job, **more, "name": f"bench-{mode}"}) for mode, more in MODES.items()}
    pace = {mode: Pace.between(step_ends(events), 1 if tiny else WARM_UP) for mode, events in found.items()}
    speed = {mode: one.steps_per_hour for mode, one in pace.items()}
    return {
        "steps_per_hour": speed,
        "steps_per_hour_spread": {mode: one.spread for mode, one in pace.items()},
        "ratio": speed["async"] / speed["sync"],
        "max_staleness_seen": max_staleness(found["async"]),
        "eta": ETA,
        "steps_measured": {mode: len(one.seconds) for mode, one in pace.items()},
    }


def max_staleness(events: list[JobEvent]) -> int:
    """By how many versions the oldest consumed sample lagged, over all steps; a step that does not tell is an error."""
    return max(int(event.payload["staleness_max"]) for event in events if isinstance(event.value, StepReport))
