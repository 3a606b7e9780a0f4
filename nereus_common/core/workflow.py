"""One RL step of an algorithm as one value: which task runs on which model-stage, what it reads and what it writes.

The loop runs it and a planner reads it. Order is not written down: a task waits for whoever writes what it reads.

    rollouts ─┬─► rewards ────────┐
              ├─► reference ──────┼─► advantages ─┬─► update actor
              └─► critic values ──┘               └─► update critic
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import ModelStage, Stage

ACTOR_GENERATION = ModelStage("actor", Stage.GENERATION)
ACTOR_TRAINING = ModelStage("actor", Stage.TRAINING)
CRITIC_INFERENCE = ModelStage("critic", Stage.INFERENCE)
CRITIC_TRAINING = ModelStage("critic", Stage.TRAINING)
REFERENCE_INFERENCE = ModelStage("reference", Stage.INFERENCE)


class Work(StrEnum):
    """What a task does."""

    SAMPLE = "sample"
    """Generation: prompts to responses."""
    LOGPROBS = "logprobs"
    """Inference: log-probs of the response tokens."""
    VALUES = "values"
    """Inference: a value before every response token."""
    SCORES = "scores"
    """Inference: one score for each whole response."""
    REWARD = "reward"
    """Reward functions and environments, in processes beside the job's loop."""
    TOTAL = "total"
    """Arithmetic in the job's loop: all rewards of a response, weighed."""
    ADVANTAGES = "advantages"
    """Arithmetic in the job's loop."""
    UPDATE = "update"
    """Training: optimizer updates, then a new version."""


class Data(StrEnum):
    """What passes between tasks. A reward model called M writes `scores:M`, an update of model M `version:M`."""

    RESPONSES = "responses"
    BASELINE = "baseline"
    """Greedy responses to the same prompts, and their rewards."""
    REWARDS = "rewards"
    REFERENCE = "reference"
    VALUES = "values"
    ADVANTAGES = "advantages"


@dataclass(frozen=True, slots=True)
class Task:
    """`stage` is None where no model is needed. Reads and writes are `Data` or names made from models."""

    name: str
    work: Work
    stage: ModelStage | None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workflow:
    """The tasks of one step. InvalidInput: a name or an output occurs twice, an input has no source, or a cycle."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        _unique("task", (task.name for task in self.tasks))
        _unique("output", (output for task in self.tasks for output in task.writes))
        written = {output for task in self.tasks for output in task.writes}
        for task in self.tasks:
            for missing in set(task.reads) - written:
                raise InvalidInput(f"task {task.name} reads {missing}, which no task writes", field=task.name)
        self.waves()

    def __getitem__(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        raise InvalidInput(f"the workflow has no task {name}", field="workflow")

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must end before `task` begins."""
        return tuple(other for other in self.tasks if set(other.writes) & set(task.reads))

    def waves(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks by the length of the longest chain before them: a task needs only tasks of earlier waves."""
        done: set[str] = set()
        waves: list[tuple[Task, ...]] = []
        while len(done) < len(self.tasks):
            ready = [task for task in self.tasks if task.name not in done]
            wave = tuple(task for task in ready if all(other.name in done for other in self.needs(task)))
            if not wave:
                raise InvalidInput(f"tasks {', '.join(t.name for t in ready)} wait for each other", field="workflow")
            done.update(task.name for task in wave)
            waves.append(wave)
        return tuple(waves)

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(sorted({task.stage for task in self.tasks if task.stage is not None}))

    @property
    def trained(self) -> tuple[str, ...]:
        """Models that are updated, in the order of their names."""
        return tuple(sorted(task.stage.model for task in self.tasks if task.stage and task.work is Work.UPDATE))


def rl_workflow(
    *,
    critic: bool = False,
    reference: bool = False,
    baseline: bool = False,
    reward_functions: bool = True,
    reward_models: Iterable[str] = (),
) -> Workflow:
    """The step of a policy-gradient algorithm with the parts it asks for.

    PPO has a critic; ReMax a baseline: greedy responses, scored as the sampled ones are; GRPO, RLOO and REINFORCE++
    have neither. `reference`: a penalty for leaving a reference model.
    """
    models = tuple(reward_models)
    sampled = (str(Data.RESPONSES), *((str(Data.BASELINE),) if baseline else ()))
    scores = tuple(f"scores:{model}" for model in models)
    tasks = [Task("rollouts", Work.SAMPLE, ACTOR_GENERATION, (), (Data.RESPONSES,))]
    if baseline:
        tasks.append(Task("baseline", Work.SAMPLE, ACTOR_GENERATION, (), (Data.BASELINE,)))
    for model, output in zip(models, scores, strict=True):
        stage = ModelStage(model, Stage.INFERENCE)
        tasks.append(Task(f"score with {model}", Work.SCORES, stage, sampled, (output,)))
    functions = ("scores:functions",) if reward_functions else ()
    if functions:
        tasks.append(Task("reward functions", Work.REWARD, None, sampled, functions))
    tasks.append(Task("rewards", Work.TOTAL, None, (*sampled, *functions, *scores), (Data.REWARDS,)))
    known: list[str] = [Data.RESPONSES, Data.REWARDS]
    if reference:
        reads: tuple[str, ...] = (Data.RESPONSES,)
        tasks.append(Task("reference", Work.LOGPROBS, REFERENCE_INFERENCE, reads, (Data.REFERENCE,)))
        known.append(Data.REFERENCE)
    if critic:
        tasks.append(Task("critic values", Work.VALUES, CRITIC_INFERENCE, (Data.RESPONSES,), (Data.VALUES,)))
        known.append(Data.VALUES)
    tasks.append(Task("advantages", Work.ADVANTAGES, None, tuple(known), (Data.ADVANTAGES,)))
    if critic:
        tasks.append(Task("update critic", Work.UPDATE, CRITIC_TRAINING, (Data.ADVANTAGES,), ("version:critic",)))
    tasks.append(Task("update actor", Work.UPDATE, ACTOR_TRAINING, (Data.ADVANTAGES,), ("version:actor",)))
    return Workflow(tuple(tasks))


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInput(f"{kind} {name} occurs twice in the workflow", field="workflow")
        seen.add(name)
