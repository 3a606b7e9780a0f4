"""What a step tells: the payload of its event, and the samples that are kept for reading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.rl.diagnostics import explained_variance, staleness
from nereus_common.rl.prompts import PromptSource
from nereus_common.rl.rollouts import RolloutBatch

from .sampler import Decode
from .step import StepData
from .synced import Synced


def step_event(data: StepData, synced: Mapping[str, Synced]) -> dict[str, Any]:
    """See docs/events.md. Metrics of the actor's update stand by themselves, others under their model's name."""
    actor = data.updated["actor"]
    told: dict[str, Any] = {
        **_renamed(actor.metrics),
        "step": data.step,
        "version": actor.version,
        **_of_batch(data.batch, data.step),
        "rewards": {label: float(scores.mean()) for label, scores in data.scores.items()},
        "seconds": dict(data.watch.seconds),
        "training_seconds": dict(actor.seconds),
        "training_peak_memory_bytes": actor.peak_memory_bytes,
    }
    for model, updated in data.updated.items():
        if model != "actor":
            told |= {f"{model}_{name}": value for name, value in updated.metrics.items()}
            told[f"{model}_seconds"] = dict(updated.seconds)
    for model, report in synced.items():
        told["sync" if model == "actor" else f"{model}_sync"] = report.told()
    return told


def _renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {("logprob_gap_mean" if name == "logprob_gap" else name): value for name, value in metrics.items()}


def _of_batch(batch: RolloutBatch, step: int) -> dict[str, float]:
    lengths = batch.response_lengths
    if not batch.sequences:
        return {"tokens": 0, "reward_mean": 0.0}
    oldest, mean = staleness(batch, step)
    told = {
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        "tokens": int(batch.mask.sum()),
        "response_length_mean": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "finished_fraction": float(batch.finished.mean()),
        "staleness_max": oldest,
        "staleness_mean": mean,
    }
    if len(batch.reference):
        log_ratio = (batch.logprobs - batch.reference)[batch.mask]
        told["kl"] = float(log_ratio.mean()) if len(log_ratio) else 0.0
    if len(batch.values):
        told["explained_variance"] = explained_variance(batch)
    return told


def write_samples(path: Path, data: StepData, prompts: PromptSource, decode: Decode, count: int) -> None:
    """Keep the first `count` samples of the step, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in _samples(data, prompts, decode, count):
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")


def samples_file(folder: Path, step: int) -> Path:
    return folder / "samples" / f"step-{step:08d}.jsonl"


def _samples(data: StepData, prompts: PromptSource, decode: Decode, count: int) -> Iterator[dict[str, Any]]:
    batch = data.batch
    number = np.arange(batch.sequences) - np.searchsorted(batch.group, batch.group)
    for sequence in range(min(count, batch.sequences)):
        span, group = batch.span(sequence), int(batch.group[sequence])
        mask = batch.mask[span]
        versions = batch.versions[span][mask]
        advantages = batch.advantages[span][mask]
        prompt = prompts.at(int(batch.position[group]))
        yield {
            "position": prompt.position,
            "sample": int(number[sequence]),
            "prompt": prompt.question.text,
            "answer": prompt.question.answer,
            "response": decode(batch.response(sequence).tolist()),
            "reward": float(batch.rewards[sequence]),
            "advantage": float(advantages.mean()) if len(advantages) else 0.0,
            "finished": bool(batch.finished[sequence]),
            "tokens": int(mask.sum()),
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
            "turns": _runs(mask),
        }


def _runs(mask: NDArray[np.bool_]) -> int:
    """How many stretches of sampled tokens there are."""
    return int((np.diff(mask.astype(np.int8), prepend=0) == 1).sum())
