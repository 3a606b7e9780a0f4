"""How a job samples, optimises, evaluates, saves and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from nereus.spec.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SamplingSpec(Section):
    """How responses are sampled in training. `top_k` 0 and `top_p` 1 keep every token."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    max_tokens: PositiveInt = 256


class OptimizerSpec(Section):
    """AdamW. The rate climbs for `warmup_steps` updates, then follows `schedule`; `max_grad_norm` 0 clips nothing."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The rate of update `step` (from 0) of `steps`."""
        from nereus_common.rl.schedule import learning_rate

        return learning_rate(
            step, peak=self.learning_rate, schedule=self.schedule, warmup=self.warmup_steps, steps=steps
        )


class EvaluationSpec(Section):
    """Held-out accuracy: `size` questions that training never sees, each answered once per mode.

    `sampled` uses the sampling of training, `greedy` takes the likeliest token. `every` 0: only before and after.
    """

    size: NonNegativeInt = 0
    every: NonNegativeInt = 0
    before: bool = True
    after: bool = True
    modes: tuple[Literal["sampled", "greedy"], ...] = ("sampled", "greedy")


class DeadlinesSpec(Section):
    """Seconds after which a wait ends in a named error."""

    place: PositiveFloat = 900.0
    generate: PositiveFloat = 600.0
    score: PositiveFloat = 600.0
    train: PositiveFloat = 600.0
    sync: PositiveFloat = 300.0
    release: PositiveFloat = 60.0


class AsyncSpec(Section):
    """Generation goes on while the job trains, on devices of its own.

    `staleness` η: a sample is never consumed more than η versions after its oldest token was sampled. `partial`: new
    weights interrupt responses, which go on under them with the tokens they have; without it each is finished first.
    """

    staleness: PositiveInt = 1
    partial: bool = True


InFlight = Literal["finish", "resume", "requeue"]
"""What becomes of responses in flight when their unit is to go: `Drain` of generation.proto."""


class TransitionsSpec(Section):
    """How the job changes its plan. `in_flight`: what becomes of responses whose generation unit is to go.

    `finish`: they end on it, which the transition waits for. `resume`: they go on, from the tokens they have, on the
    unit that takes its place; every token keeps the version that sampled it. `requeue`: they are thrown away and their
    groups are drawn again, for the same prompts. Responses on units that stay go on. A synchronous job has none.
    """

    in_flight: InFlight = "finish"


class AdaptSpec(Section):
    """Whether the job changes its plan by itself (docs/planning.md).

    `off`; `dry-run`: steps are measured and decisions told, but nothing is moved; `auto`: they are carried out. A move
    is taken where it repays within `gamma` of the steps for which it will be of use. A plan whose step is by no more
    than the share `near` longer than the best one's is considered too, because its move may be cheaper.
    `length_change`, `efficiency_change`: relative changes of the mean sequence length and of what the hardware achieves
    from which on another plan is looked for. `pin`: model-stages that keep their layout and replicas.
    """

    mode: Literal["off", "dry-run", "auto"] = "off"
    gamma: Fraction = 0.5
    near: NonNegativeFloat = 0.05
    length_change: PositiveFloat | None = None
    efficiency_change: PositiveFloat | None = None
    pin: tuple[str, ...] = ()


class CheckpointSpec(Section):
    """A checkpoint after every `every` steps (0: none) and after the last; the newest `keep` stay.

    `folder`: where they go, seen under this path by controller and training services alike; by default the job's own.
    `resume`: `auto` runs a job that lost a process on from the last one by itself, at most `attempts` times without
    a new checkpoint in between; `manual` waits for `nereus job resume`.
    """

    every: NonNegativeInt = 0
    keep: PositiveInt = 2
    folder: Path | None = None
    resume: Literal["auto", "manual"] = "manual"
    attempts: PositiveInt = 3

    def root(self, job: str, job_folder: Path) -> Path:
        """Where the checkpoints of job `job`, whose own folder is `job_folder`, lie."""
        return job_folder / "checkpoints" if self.folder is None else self.folder / job


class RolloutsSpec(Section):
    """`record`: keep every step's rollouts in the job's folder. `replay`: take them from such a folder instead of
    sampling, step by step. `samples`: how many of a step are kept for `nereus job samples`."""

    record: bool = False
    replay: Path | None = None
    samples: NonNegativeInt = 16


class WandbSpec(Section):
    """Weights & Biases, where the package `wandb` is installed."""

    project: str
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class MetricsSpec(Section):
    """Beside metrics.jsonl in the job's folder, which is always written, and the controller's Prometheus page."""

    tensorboard: bool = False
    wandb: WandbSpec | None = None
