"""One training rank under torch.profiler: `python -m benchmarks.profile_rank JOB RESULT RESPONSE_LENGTH`.

Ends after writing RESULT: operators of one update by their own time, and its seconds by phase.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nereus.spec import JobSpec
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import StagePlan
from nereus_common.core.workflow import ACTOR_TRAINING
from nereus_common.engines.options import Rendezvous
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.engines.training.base import TrainingOptions, TrainingRankConfig, TrainStepSpec
from nereus_common.rl.assembly import Completion, Group, assemble, share_groups
from nereus_common.rl.order import step_positions
from nereus_common.rl.prompts import OrderedPrompts
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import loss_weights
from nereus_common.rpc.ports import free_port

TOP = 12
WARM_UP = 2
"""Updates before the one that is profiled: shapes are compiled, memory is faulted in."""


def main(arguments: list[str]) -> int:
    job_file, result_file, length = arguments
    job = JobSpec.from_json(Path(job_file).read_text(), job_file)
    Path(result_file).write_text(json.dumps(profile(job, float(length))))
    return 0


def profile(job: JobSpec, response_length: float) -> dict[str, Any]:
    """Operators of one update of the job's first training rank, and seconds by phase."""
    import torch
    from torch.profiler import ProfilerActivity

    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    plan = job.explicit_plan
    assert plan is not None, "the benchmark's job has a plan"
    ranks = len(plan[ACTOR_TRAINING].devices)
    batch = make_batch(job, response_length)
    share = batch.select_groups(share_groups(batch, ranks)[0])
    engine = TorchTrainingEngine(_config(job, plan[ACTOR_TRAINING], ranks))
    try:
        engine.load(0)
        for step in range(WARM_UP):
            engine.train_step(_spec(job, share, step), share.columns())
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            done = engine.train_step(_spec(job, share, WARM_UP), share.columns())
    finally:
        engine.close()
    return {"operators": operators(profiler.key_averages(), TOP), "seconds": dict(done.seconds)}


def operators(averages: Iterable[Any], top: int) -> list[dict[str, Any]]:
    """The `top` operators by their own time (without what they call), as seconds and as a share of all operators'."""
    found = sorted(averages, key=lambda one: -one.self_cpu_time_total)
    whole = sum(one.self_cpu_time_total for one in found)
    return [
        {
            "name": one.key,
            "self_seconds": one.self_cpu_time_total / 1e6,
            "share": one.self_cpu_time_total / whole,
            "calls": one.count,
        }
        for one in found[:top]
    ]


def make_batch(job: JobSpec, response_length: float) -> RolloutBatch:
    """A step's batch in its real shape: the job's prompts, and random responses whose lengths have the given mean.

    Lengths are geometric and cut at `max_tokens`, as of a model that ends each time with the same chance.
    """
    rng = np.random.default_rng(job.seed)
    tokenizer = ChatTokenizer(Path(job.model("actor").path))
    prompts = OrderedPrompts(job.prompts.open(job.seed, 0), tokenizer, job.seed)
    groups = [
        Group(
            prompt.position,
            prompt.token_ids,
            tuple(_completion(rng, job, prompt.token_ids, response_length) for _ in _samples(job)),
        )
        for prompt in prompts.batch(step_positions(0, job.algorithm.groups_per_step))
    ]
    batch = assemble(groups)
    weights = loss_weights(batch, 1, job.algorithm.aggregation, longest=job.sampling.max_tokens)
    return batch.with_columns(
        rewards=np.zeros(batch.sequences, np.float32),
        advantages=rng.standard_normal(len(batch.response_tokens)).astype(np.float32),
        weights=weights,
    )


def _samples(job: JobSpec) -> range:
    return range(job.algorithm.samples_per_group)


def _completion(rng: np.random.Generator, job: JobSpec, prompt: tuple[int, ...], mean: float) -> Completion:
    length = min(int(rng.geometric(min(1.0, 1.0 / mean))), job.sampling.max_tokens)
    tokens = tuple(int(token) for token in rng.choice(prompt, length))
    return Completion(tokens, (-1.0,) * length, (0,) * length, finished=True)


def _spec(job: JobSpec, batch: RolloutBatch, step: int) -> TrainStepSpec:
    return TrainStepSpec(
        step=step,
        loss=job.algorithm.loss_options(),
        learning_rate=job.optimizer.learning_rate,
        max_grad_norm=job.optimizer.max_grad_norm,
        minibatch_tokens=(batch.loss_tokens,),
        temperature=job.sampling.temperature,
    )


def _config(job: JobSpec, stage: StagePlan, ranks: int) -> TrainingRankConfig:
    """One rank alone, with the share of the cores that a rank of the job has."""
    alone = dataclasses.replace(stage, layout=parse_replicated("tp1.pp1.fs1")[0], replicas=1, devices=stage.devices[:1])
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    rendezvous = Rendezvous("127.0.0.1", free_port(), "profile")
    path = job.model("actor").path
    return TrainingRankConfig("profile", path, alone, 0, 0, rendezvous, TrainingOptions(threads=threads))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
