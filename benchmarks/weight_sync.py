"""Weight sync in real runs: bytes at the transport against bytes lacking, GB/s, seconds by model and layout.

Limit: moved over needed is 1.00 when every byte a destination lacks crosses once and no other does. Seconds hold the
pull, the digests on both sides, the engine's own loading and the read-back of what it computes with.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

from benchmarks.cluster import cluster, run_job
from benchmarks.step import SPEC
from nereus.events import StepReport

STEPS = 4
PAIRS = (
    ("tp1.pp1.fs2", "tp1.pp1.fs1 x2"),
    ("tp1.pp2.fs1", "tp1.pp1.fs1 x1"),
    ("tp3.pp1.fs1", "tp3.pp1.fs1 x1"),
)
"""(training, generation) layouts of SmolLM2-135M."""
DEVICES = 6


def run() -> dict[str, Any]:
    with cluster(DEVICES) as (state, _):
        found = {f"smollm2-135m {pair[0]} -> {pair[1]}": _measure(state, number) for number, pair in enumerate(PAIRS)}
    moved = sum(one["bytes_moved"] for one in found.values())
    needed = sum(one["bytes_needed"] for one in found.values())
    return {
        "moved_over_needed": moved / needed,
        "gb_per_s": {name: one["gb_per_s"] for name, one in found.items()},
        "seconds": {name: one["seconds"] for name, one in found.items()},
        "bytes": {name: one["bytes_needed"] for name, one in found.items()},
    }


def _measure(state: Any, number: int) -> dict[str, float]:
    """Per sync: the median seconds and rate over the steps, the bytes of all steps together."""
    syncs = [event.value.sync for event in run_job(state, _spec(number)) if isinstance(event.value, StepReport)]
    return {
        "bytes_moved": sum(sync["bytes_moved"] for sync in syncs),
        "bytes_needed": sum(sync["bytes_needed"] for sync in syncs),
        "seconds": statistics.median(sync["seconds"] for sync in syncs),
        "gb_per_s": statistics.median(sync["bytes_moved"] / sync["seconds"] / 1e9 for sync in syncs),
    }


def _spec(number: int) -> dict[str, Any]:
    training, generation = PAIRS[number]
    spec: dict[str, Any] = copy.deepcopy(SPEC)
    spec.update(name=f"bench-sync-{number}", steps=STEPS)
    spec["algorithm"] = {"groups_per_step": 2, "samples_per_group": 2}
    stages = spec["plan"]["stages"]
    stages["actor/generation"].update(layout=generation, devices=[f"node0/cpu{i}" for i in range(_ranks(generation))])
    stages["actor/training"].update(layout=training, devices=[f"node0/cpu{3 + i}" for i in range(_ranks(training))])
    return spec


def _ranks(layout: str) -> int:
    from nereus_common.core.layout import parse_replicated

    inside, replicas = parse_replicated(layout)
    return inside.ranks * replicas
