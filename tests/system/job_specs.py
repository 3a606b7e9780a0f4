"""Job files as Python values, small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMITS = {"max_sequences": 16, "max_batched_tokens": 512, "max_length": 128, "kv_bytes": 32 << 20}
DTYPES = {"master": "float32", "compute": "float32", "kv": "float32"}


def job_spec(
    name: str,
    model: Path,
    *,
    generation: str = "tp1.pp1.fs1",
    training: str = "tp1.pp1.fs1",
    reference: str | None = None,
    others: dict[str, str] | None = None,
    engine: str = "vllm",
    steps: int = 2,
    **more: Any,
) -> dict[str, Any]:
    """A job on one-digit sums, GRPO unless `more` says otherwise.

    Its layouts take cpu0, cpu1 … in the order generation, training, reference, `others`.
    """
    layouts = {"actor/generation": generation, "actor/training": training}
    if reference is not None:
        layouts["reference/inference"] = reference
    layouts |= others or {}
    return {
        "name": name,
        "models": {"actor": {"path": str(model), "engines": {"generation": {"name": engine}}}},
        "algorithm": {
            "groups_per_step": 4,
            "samples_per_group": 4,
            "kl": {"beta": 0.01 if reference is not None else 0.0},
        },
        "sampling": {"max_tokens": 6},
        "optimizer": {"learning_rate": 1e-3},
        "steps": steps,
        "prompts": {
            "task": "chain_sum",
            "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "size": 64,
        },
        "rewards": [f"{Path(__file__).parent / 'rewards.py'}:digit_share"],
        "plan": {"stages": _stages(layouts)},
        "max_logprob_gap": 1e-3,
        "evaluation": {"size": 8},
        **more,
    }


def _stages(layouts: dict[str, str]) -> dict[str, Any]:
    from nereus_common.core.layout import parse_replicated

    stages: dict[str, Any] = {}
    first = 0
    for stage, text in layouts.items():
        layout, replicas = parse_replicated(text)
        ranks = layout.ranks * replicas
        devices = [f"node0/cpu{index}" for index in range(first, first + ranks)]
        stages[stage] = {"layout": text, "devices": devices, "dtypes": DTYPES, "microbatch_tokens": 256}
        first += ranks
    stages["actor/generation"]["generation"] = LIMITS
    return stages
