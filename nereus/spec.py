"""JobSpec: what a job is to do, as one frozen value.

Loading from files and the wording of errors are in `nereus.spec_file`; what the values mean is said here, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from nereus.spec_errors import refusal
from nereus_common.core.errors import InvalidInput, NereusError
from nereus_common.core.ids import ModelStage, Stage, check_name
from nereus_common.core.plan import Plan, plan_from_dict

if TYPE_CHECKING:
    from nereus_common.rl.prompts import QuestionSet

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]

ACTOR_GENERATION = ModelStage("actor", Stage.GENERATION)
ACTOR_TRAINING = ModelStage("actor", Stage.TRAINING)
REFERENCE_INFERENCE = ModelStage("reference", Stage.INFERENCE)


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class EngineSpec(Section):
    """A named engine of a stage; an empty name takes the stage's default."""

    name: str = ""
    options: dict[str, Any] = {}


class ModelSpec(Section):
    """A model of the job. `path`: a Hugging Face folder, or `demo:smollm2`."""

    path: str
    engines: dict[Stage, EngineSpec] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value

    @field_validator("path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


class GrpoSpec(Section):
    """GRPO (Shao et al. 2024, arXiv 2402.03300): `groups_per_step` prompts, each answered `samples_per_group` times.

    The advantage is the reward less the group's mean, divided by the group's standard deviation where
    `normalise_std`. The ratio is clipped to [1 - clip_low, 1 + clip_high]; `kl_beta` weighs the penalty for leaving
    the reference model, and 0 leaves that model out. `tis_cap` caps the importance weight of tokens whose sampler and
    trainer disagree; None weighs all alike.
    """

    name: Literal["grpo"] = "grpo"
    groups_per_step: PositiveInt = 16
    samples_per_group: Annotated[int, Field(ge=2)] = 8
    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.2
    kl_beta: NonNegativeFloat = 0.0
    tis_cap: PositiveFloat | None = None
    normalise_std: bool = True

    def loss_options(self) -> dict[str, Any]:
        """What the training engine is told about the loss."""
        return self.model_dump(include={"name", "clip_low", "clip_high", "kl_beta", "tis_cap"})


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


class PromptsSpec(Section):
    """What task and file prompts have in common.

    `size` bounds the training questions, `examples` solved questions stand before each prompt, `system` is the
    system message (none: the chat template's own default).
    """

    size: PositiveInt = 4096
    examples: NonNegativeInt = 0
    system: str | None = None


class TaskPrompts(PromptsSpec):
    """A reasoning-gym task and the fields of its config."""

    task: str
    params: dict[str, Any] = {}

    def open(self, seed: int, heldout: int) -> QuestionSet:
        from nereus_common.rl.prompts import Sizes
        from nereus_common.rl.sources import TaskSource

        sizes = Sizes(train=self.size, heldout=heldout, examples=self.examples)
        return TaskSource(self.task, self.params, sizes, self.system).open(seed)


class FilePrompts(PromptsSpec):
    """A .jsonl or .parquet file, and the names of its columns."""

    file: Path
    question: str = "question"
    answer: str = "answer"

    def open(self, seed: int, heldout: int) -> QuestionSet:
        from nereus_common.rl.prompts import Sizes
        from nereus_common.rl.sources import FileSource

        sizes = Sizes(train=self.size, heldout=heldout, examples=self.examples)
        return FileSource(self.file, self.question, self.answer, sizes, self.system).open(seed)


def _prompts_kind(value: Any) -> str:
    has_file = "file" in value if isinstance(value, Mapping) else hasattr(value, "file")
    return "file" if has_file else "task"


Prompts = Annotated[
    Annotated[TaskPrompts, Tag("task")] | Annotated[FilePrompts, Tag("file")], Discriminator(_prompts_kind)
]


class RewardSpec(Section):
    """A reward by installed name, `package.module:function` or `file.py:function`; `timeout_seconds` per sample."""

    name: str
    weight: float = 1.0
    timeout_seconds: PositiveFloat = 10.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


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


class JobSpec(Section):
    """A whole job. Only `model` or `models`, `prompts` and `rewards` must be given."""

    name: str = "job"
    models: dict[str, ModelSpec]
    algorithm: GrpoSpec = GrpoSpec()
    sampling: SamplingSpec = SamplingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    steps: PositiveInt = 100
    seed: NonNegativeInt = 0
    prompts: Prompts
    rewards: Annotated[tuple[RewardSpec, ...], Field(min_length=1)]
    plan: dict[str, Any] | None = None
    max_logprob_gap: PositiveFloat | None = None
    """The job stops when the mean |log-prob gap| of a step exceeds this; None: it is only reported."""
    evaluation: EvaluationSpec = EvaluationSpec()
    deadlines: DeadlinesSpec = DeadlinesSpec()

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, value: Any) -> Any:
        """`model: X` is short for `models: {actor: X}`."""
        if isinstance(value, Mapping) and "model" in value and "models" not in value:
            return {
                **{key: entry for key, entry in value.items() if key != "model"},
                "models": {"actor": value["model"]},
            }
        return value

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        return str(_as_value_error(check_name, value, "name"))

    @field_validator("models")
    @classmethod
    def _known_models(cls, value: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
        if "actor" not in value or not value.keys() <= {"actor", "reference"}:
            raise ValueError(f"GRPO has an actor and perhaps a reference, not {', '.join(sorted(value)) or 'no model'}")
        return value

    @field_validator("plan")
    @classmethod
    def _understood_plan(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _as_value_error(plan_from_dict, value)
        return value

    @model_validator(mode="after")
    def _plan_has_the_stages(self) -> Self:
        plan = self.explicit_plan
        missing = [str(stage) for stage in self.model_stages if plan is not None and stage not in plan]
        if missing:
            raise ValueError(f"the plan has no {', '.join(missing)}, which this job needs")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model enter the loss."""
        return self.algorithm.kl_beta > 0

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """The model-stages that this job needs."""
        needed = (ACTOR_GENERATION, ACTOR_TRAINING)
        return (*needed, REFERENCE_INFERENCE) if self.needs_reference else needed

    @property
    def explicit_plan(self) -> Plan | None:
        """The plan given in the spec, if one is; else the controller makes the default plan for its devices."""
        return None if self.plan is None else plan_from_dict(self.plan)

    def model(self, name: str) -> ModelSpec:
        """A model by name; the reference is the actor's starting point unless it is given."""
        return self.models.get(name, self.models["actor"])

    def to_json(self) -> str:
        """With every default filled in."""
        return self.model_dump_json()

    @classmethod
    def from_dict(cls, data: Any, origin: str = "job") -> Self:
        """Validate; InvalidInput names `origin` and every field that is wrong."""
        if not isinstance(data, Mapping):
            raise InvalidInput(f"{origin} holds no job but {type(data).__name__}", remedy="write field: value lines")
        try:
            return cls.model_validate(data)
        except ValidationError as wrong:
            raise refusal(cls, wrong, origin) from wrong

    @classmethod
    def from_json(cls, text: str, origin: str = "job") -> Self:
        """The inverse of `to_json`, with the errors of `from_dict`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as wrong:
            raise InvalidInput(f"{origin} is not JSON: {wrong}", field="spec_json") from wrong
        return cls.from_dict(data, origin)


def _as_value_error(check: Any, *arguments: Any) -> Any:
    """pydantic collects ValueErrors with the field they belong to; our own errors join them."""
    try:
        return check(*arguments)
    except NereusError as wrong:
        raise ValueError(str(wrong)) from wrong
