"""A peer's set-up: what must be equal on all sides comes from the job, the rest from the peer's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nereus.spec import JobSpec
from nereus.spec.algorithms import GrpoSpec
from nereus_common.config import Settings, load
from nereus_common.core.errors import InvalidInput

HERE = Path(__file__).parent
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
"""Our aggregation → TRL's name for it."""


class TrlConfig(Settings):
    """`microbatch`: sequences in one forward. `threads`: of torch, None: its own choice. `model`: for
    `from_pretrained`. `environment`: variables of its process. `arguments`: of GRPOConfig."""

    microbatch: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)] | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)


def trl_config(name: str) -> TrlConfig:
    """The frozen set-up `name`."""
    return load(TrlConfig, HERE / f"{name}.yaml", {})


def grpo_arguments(job: JobSpec, peer: TrlConfig) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig. InvalidInput where TRL cannot do this job, or its file takes what the job says."""
    algorithm, optimizer, sampling = job.algorithm, job.optimizer, job.sampling
    if not isinstance(algorithm, GrpoSpec) or algorithm.minibatches * algorithm.epochs != 1 or job.needs_reference:
        raise InvalidInput("the comparison is made for GRPO with one update a step and no reference", field="algorithm")
    batch = algorithm.groups_per_step * algorithm.samples_per_group
    microbatch = min(peer.microbatch, batch)
    if batch % microbatch:
        raise InvalidInput(f"{batch} sequences are no multiple of {microbatch}", field="microbatch")
    scheduled = optimizer.schedule != "constant" or not optimizer.warmup_steps
    of_job = {
        "num_generations": algorithm.samples_per_group,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": batch // microbatch,
        "max_steps": job.steps,
        "max_completion_length": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "beta": 0.0,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "loss_type": LOSS_TYPES[algorithm.aggregation],
        "scale_rewards": "group" if algorithm.normalise_std else "none",
        "reward_weights": [reward.weight for reward in job.rewards],
        "optim": "adamw_torch",
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.schedule if scheduled else "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "seed": job.seed,
        "shuffle_dataset": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if taken := of_job.keys() & peer.arguments.keys():
        raise InvalidInput(f"the job decides {', '.join(sorted(taken))}, not the peer's file", field="arguments")
    return of_job | peer.arguments
