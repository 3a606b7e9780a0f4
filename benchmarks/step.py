"""Seconds by stage and tokens/s of one RL step, on the work for which TRL's time on such a machine is known.

Work: SmolLM2-135M-Instruct in bfloat16, GRPO, 16 prompts × 8 samples, at most 24 new tokens, temperature 1, two CPU
cores. Peer: TRL 1.16 (GRPOTrainer, bf16=True, use_cpu=True, its own generation) took 83–91 s per step on it; that time
was measured on such a machine, in another run, so the ratio here is a guide and not a comparison within one run.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cluster import cluster, run_job
from nereus.events import StepReport

STEPS = 6
WARM_UP = 2
"""Steps in which shapes are met for the first time and compiled."""
TRL_SECONDS = (83.0, 91.0)

SPEC = {
    "name": "bench-step",
    "model": "demo:smollm2",
    "algorithm": {"groups_per_step": 16, "samples_per_group": 8},
    "sampling": {"temperature": 1.0, "max_tokens": 24},
    "optimizer": {"learning_rate": 1e-6},
    "steps": STEPS,
    "prompts": {"task": "letter_counting", "params": {"min_words": 1, "max_words": 2}, "examples": 3},
    "rewards": ["exact_answer"],
    "plan": {
        "stages": {
            "actor/generation": {
                "layout": "tp1.pp1.fs1 x2",
                "devices": ["node0/cpu0", "node0/cpu1"],
                "generation": {"max_sequences": 64, "max_batched_tokens": 2048, "max_length": 512, "kv_bytes": 1 << 28},
            },
            "actor/training": {"layout": "tp1.pp1.fs2", "devices": ["node0/cpu2", "node0/cpu3"]},
        }
    },
}


def run() -> dict[str, Any]:
    with cluster(devices=4) as (state, _):
        events = run_job(state, SPEC)
    reports = [event.value for event in events if isinstance(event.value, StepReport)][WARM_UP:]
    totals = [report.seconds["total"] for report in reports]
    stages = sorted({stage for report in reports for stage in report.seconds})
    median = statistics.median(totals)
    return {
        "seconds": {stage: statistics.median(report.seconds[stage] for report in reports) for stage in stages},
        "seconds_spread": [min(totals), max(totals)],
        "training_seconds": {
            phase: statistics.median(report.training_seconds[phase] for report in reports)
            for phase in reports[0].training_seconds
        },
        "tokens_per_second": statistics.median(report.tokens_per_second for report in reports),
        "response_length_mean": statistics.mean(report.response_length_mean for report in reports),
        "steps_measured": len(reports),
        "peer": "TRL 1.16 GRPOTrainer, bf16=True, use_cpu=True: 83–91 s per step, from another run",
        "peer_ratio": [seconds / median for seconds in TRL_SECONDS],
    }
