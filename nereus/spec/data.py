"""Prompts, environments and rewards: what a job's responses answer, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from nereus.spec.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from nereus_common.rl.prompts import QuestionSet


class PromptsSpec(Section):
    """What task and file prompts have in common.

    `size` bounds the training questions, `examples` solved questions stand before each prompt, `system` is the
    system message (none: the chat template's own default).
    """

    size: PositiveInt = 4096
    examples: NonNegativeInt = 0
    system: str | None = None


class TaskPrompts(PromptsSpec):
    """A reasoning-gym task and the fields of its config.

    `balanced`: draw training and held-out questions so that their answers are spread as evenly as the task allows,
    where one answer would else score well by itself. Rare answers must be found first: it makes twenty times as many
    questions as it keeps, and 10,000 at least.
    """

    task: str
    params: dict[str, Any] = Field(default_factory=dict)
    balanced: bool = False

    def open(self, seed: int, heldout: int) -> QuestionSet:
        from nereus_common.rl.prompts import Sizes
        from nereus_common.rl.sources import TaskSource

        sizes = Sizes(train=self.size, heldout=heldout, examples=self.examples)
        return TaskSource(self.task, self.params, sizes, self.system, self.balanced).open(seed)


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
    """A reward function by installed name, `package.module:function` or `file.py:function`; or a reward model.

    `model` names an entry of `models`: a sequence classifier with one output, which scores whole responses in an
    inference model-stage of that name. `timeout_seconds` is per sample, for functions. A sample's reward is the sum of
    all, each times its `weight`.
    """

    name: str = ""
    model: str = ""
    weight: float = 1.0
    timeout_seconds: PositiveFloat = 10.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_kind(self) -> RewardSpec:
        if bool(self.name) == bool(self.model):
            raise ValueError("a reward is a function (name) or a model (model): give one of the two")
        return self

    @property
    def label(self) -> str:
        """What its mean is called in events."""
        return self.model or self.name.rsplit(":", 1)[-1]


class EnvironmentSpec(Section):
    """A dialogue: after each response the environment answers, gives a reward, and may end it.

    `name`: an installed environment, `package.module:Class` or `file.py:Class`, or a function in place of the class;
    `options` are its constructor's arguments. At most `max_turns` responses of `sampling.max_tokens` each, and
    `max_tokens` in all, the environment's answers included. `timeout_seconds` and `memory_bytes` limit one call and one
    process, of which there are `processes`.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    max_turns: PositiveInt = 4
    max_tokens: PositiveInt = 2048
    timeout_seconds: PositiveFloat = 10.0
    memory_bytes: PositiveInt = 1 << 30
    processes: PositiveInt = 2

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
