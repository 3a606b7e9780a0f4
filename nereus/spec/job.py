"""JobSpec: what a job is to do, as one frozen value.

Loading from files and the wording of errors are in `nereus.spec_file`; what the values mean is said here, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from nereus.spec.algorithms import Algorithm, GrpoSpec
from nereus.spec.data import EnvironmentSpec, Prompts, RewardSpec
from nereus.spec.moves import MoveSpec, merge_target
from nereus.spec.options import (
    AdaptSpec,
    AsyncSpec,
    CheckpointSpec,
    DeadlinesSpec,
    EvaluationSpec,
    MetricsSpec,
    OptimizerSpec,
    RolloutsSpec,
    SamplingSpec,
    TransitionsSpec,
)
from nereus.spec.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from nereus.spec_errors import refusal
from nereus_common.core.errors import InvalidInput, NereusError
from nereus_common.core.ids import Head, ModelStage, Stage, check_name
from nereus_common.core.plan import Plan, plan_from_dict
from nereus_common.core.workflow import ACTOR_GENERATION, Workflow, rl_workflow


class EngineSpec(Section):
    """A named engine of a stage; an empty name takes the stage's default."""

    name: str = ""
    options: dict[str, Any] = Field(default_factory=dict)


class ModelSpec(Section):
    """A model of the job. `path`: a Hugging Face folder, or `demo:smollm2`.

    `optimizer`: for a trained model that is not to use the job's own. A critic may start from a causal language model:
    its value head then starts at zero.
    """

    path: str
    engines: dict[Stage, EngineSpec] = Field(default_factory=dict)
    optimizer: OptimizerSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value

    @field_validator("path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


class JobSpec(Section):
    """A whole job. Only `model` or `models`, `prompts` and `rewards` must be given."""

    name: str = "job"
    models: dict[str, ModelSpec]
    algorithm: Algorithm = GrpoSpec()
    sampling: SamplingSpec = SamplingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    steps: PositiveInt = 100
    seed: NonNegativeInt = 0
    prompts: Prompts
    environment: EnvironmentSpec | None = None
    rewards: tuple[RewardSpec, ...] = ()
    """May be empty only where an environment gives the reward."""
    asynchronous: AsyncSpec | None = None
    """None: generation and training take turns."""
    plan: dict[str, Any] | None = None
    moves: tuple[MoveSpec, ...] = ()
    """Changes of the plan while the job runs, in the order of their steps."""
    transitions: TransitionsSpec = TransitionsSpec()
    adapt: AdaptSpec = AdaptSpec()
    max_logprob_gap: PositiveFloat | None = None
    """The job stops when the mean |log-prob gap| of a step exceeds this; None: it is only reported."""
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    redundancy: Literal[0, 1] = 0
    """1: after every step, processes on other devices take copies of the trained models' state. A job whose process is
    lost goes on from them, from the step it was at, and not from its last checkpoint."""
    rollouts: RolloutsSpec = RolloutsSpec()
    metrics: MetricsSpec = MetricsSpec()
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

    @field_validator("plan")
    @classmethod
    def _understood_plan(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _as_value_error(plan_from_dict, value)
        return value

    @field_validator("transitions")
    @classmethod
    def _resuming_may_mix_versions(cls, value: TransitionsSpec, known: ValidationInfo) -> TransitionsSpec:
        flight: AsyncSpec | None = known.data.get("asynchronous")
        if flight is not None and not flight.partial and value.in_flight == "resume":
            raise ValueError(
                "in_flight: resume lets responses go on under new weights, which asynchronous.partial: false forbids; "
                "finish and requeue do not"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _algorithm_has_a_name(cls, value: Any) -> Any:
        """`algorithm: ppo` is short for `algorithm: {name: ppo}`, and GRPO is what is meant where no name is given."""
        given = value.get("algorithm") if isinstance(value, Mapping) else None
        if isinstance(given, str):
            return {**value, "algorithm": {"name": given}}
        if isinstance(given, Mapping) and "name" not in given:
            return {**value, "algorithm": {"name": "grpo", **given}}
        return value

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        scoring = {reward.model for reward in self.rewards if reward.model}
        lacking = ({"actor"} | scoring | ({"critic"} if self.algorithm.needs_critic else set())) - self.models.keys()
        unused = self.models.keys() - {"actor", "reference", "critic", *scoring}
        taken = scoring & {"actor", "reference", "critic"}
        if lacking:
            raise ValueError(f"models lacks {', '.join(sorted(lacking))}, which this job needs")
        if unused:
            raise ValueError(
                f"models names {', '.join(sorted(unused))}, which nothing uses: there are an actor, perhaps a "
                "reference and a critic, and the models that rewards name"
            )
        if taken:
            raise ValueError(f"a reward names the model {', '.join(sorted(taken))}, which has another part to play")
        return self

    @model_validator(mode="after")
    def _something_rewards(self) -> Self:
        if not self.rewards and self.environment is None:
            raise ValueError("rewards is empty: name at least one, or an environment that gives them")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two rewards are called {max(labels, key=labels.count)}: name them apart")
        return self

    @model_validator(mode="after")
    def _replacing_knows_the_rewards(self) -> Self:
        replaces = self.algorithm.name == "grpo" and self.algorithm.equal_groups == "replace"
        if replaces and any(reward.model for reward in self.rewards):
            raise ValueError(
                "algorithm.equal_groups: replace needs rewards known group by group, which a model's are not"
            )
        return self

    @model_validator(mode="after")
    def _truncated_sampling_is_accounted_for(self) -> Self:
        """Top-p and top-k renormalise the sampler's log-probs over the kept tokens; the trainer's are not."""
        if self.sampling.top_p == 1 and self.sampling.top_k == 0:
            return self
        if self.max_logprob_gap is not None:
            raise ValueError("max_logprob_gap compares log-probs over all tokens: leave top_p and top_k out, or it")
        if self.algorithm.kl.beta and self.algorithm.kl.placement == "reward":
            raise ValueError("with top_p or top_k a KL penalty in the reward is biased: use kl.placement: loss")
        return self

    @model_validator(mode="after")
    def _pins_are_known(self) -> Self:
        known = [str(name) for name in self.model_stages]
        for name in self.adapt.pin:
            if name not in known:
                raise ValueError(f"adapt.pin names {name}, which this job lacks: it has {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _plan_fits(self) -> Self:
        if self.explicit_plan is not None:
            self._checked_plan(self.explicit_plan, "plan")
        return self

    def _checked_plan(self, plan: Plan, where: str) -> Plan:
        """ValueError names `where` when the job cannot run under `plan`."""
        missing = [str(stage) for stage in self.model_stages if stage not in plan]
        if missing:
            raise ValueError(f"the plan has no {', '.join(missing)}, which this job needs ({where})")
        if plan.staleness not in (None, self.staleness or None):
            raise ValueError(f"{where}.staleness is {plan.staleness}, asynchronous.staleness {self.staleness}")
        if self.asynchronous is not None:
            generating = set(plan[ACTOR_GENERATION].devices)
            shared = [str(n) for n in plan.names if n != ACTOR_GENERATION and generating & set(plan[n].devices)]
            if shared:
                raise ValueError(f"asynchronous generation shares devices with {', '.join(shared)}: keep them apart")
        return plan

    @model_validator(mode="after")
    def _moves_lead_somewhere(self) -> Self:
        steps = [move.after_step for move in self.moves]
        if steps != sorted(set(steps)) or (steps and steps[-1] >= self.steps):
            raise ValueError(f"moves are after the steps {steps}: each later than the one before, below {self.steps}")
        plan = self.explicit_plan
        for number, move in enumerate(self.moves if plan is not None else ()):
            assert plan is not None
            plan = self._checked_plan(_as_value_error(merge_target, plan, move.plan), f"moves[{number}].plan")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model enter loss or reward."""
        return self.algorithm.kl.beta > 0

    @property
    def staleness(self) -> int:
        """η: by how many versions a sample may lag; 0 for a synchronous job."""
        return 0 if self.asynchronous is None else self.asynchronous.staleness

    @property
    def workflow(self) -> Workflow:
        """What one step does, on which model-stages."""
        return rl_workflow(
            critic=self.algorithm.needs_critic,
            reference=self.needs_reference,
            baseline=self.algorithm.needs_baseline,
            reward_functions=any(reward.name for reward in self.rewards),
            reward_models=[reward.model for reward in self.rewards if reward.model],
        )

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """The model-stages that this job needs."""
        return self.workflow.model_stages

    def head(self, model: str) -> Head:
        """What stands on a model's decoder."""
        return Head.LM if model in ("actor", "reference") else Head.SCORE

    def optimizer_of(self, model: str) -> OptimizerSpec:
        """A trained model's own optimizer, or the job's."""
        return self.model(model).optimizer or self.optimizer

    @property
    def explicit_plan(self) -> Plan | None:
        """The plan given in the spec, if one is; else the controller makes the default plan for its devices."""
        return None if self.plan is None else plan_from_dict(self.plan)

    @property
    def written_plan(self) -> Plan:
        """The plan given in the spec; InvalidInput when there is none."""
        if self.explicit_plan is None:
            raise InvalidInput(
                f"job {self.name} has no plan of its own", remedy="write `plan:` into its file", field="plan"
            )
        return self.explicit_plan

    def model(self, name: str) -> ModelSpec:
        """A model by name; the reference is the actor's starting point unless it is given."""
        return self.models["actor"] if name == "reference" and name not in self.models else self.models[name]

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
