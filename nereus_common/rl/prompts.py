"""Prompts: questions with their answers, turned into token ids exactly once.

Training and held-out questions are disjoint by text, and neither repeats one of the worked examples that stand in every
prompt. A prompt's ids are made here and nowhere else: what is sampled from and what is trained on are these very ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.order import SampleOrder


@dataclass(frozen=True, slots=True)
class Question:
    """One task: what is asked, the reference answer ("" when there is none), and what a reward may want to know."""

    text: str
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """`train` and `heldout` share no text; `examples` are shown, solved, before each question."""

    train: tuple[Question, ...]
    heldout: tuple[Question, ...]
    examples: tuple[Question, ...] = ()
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as the model sees it. `position` is its place in the global order, or its index when held out."""

    position: int
    token_ids: tuple[int, ...]
    question: Question


class ChatEncoder(Protocol):
    """Renders a chat as token ids, ending where the assistant's answer begins."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


class PromptSource(Protocol):
    """Where a job's prompts come from."""

    def at(self, position: int) -> Prompt: ...

    def batch(self, positions: range) -> list[Prompt]: ...

    def heldout(self) -> list[Prompt]: ...


class OrderedPrompts:
    """The prompts of a question set in the global order of `seed`."""

    def __init__(self, questions: QuestionSet, encoder: ChatEncoder, seed: int) -> None:
        self._questions = questions
        self._encoder = encoder
        self._order = SampleOrder(len(questions.train), seed)

    def at(self, position: int) -> Prompt:
        return self._prompt(position, self._questions.train[self._order.index(position)])

    def batch(self, positions: range) -> list[Prompt]:
        return [self.at(position) for position in positions]

    def heldout(self) -> list[Prompt]:
        return [self._prompt(index, question) for index, question in enumerate(self._questions.heldout)]

    def _prompt(self, position: int, question: Question) -> Prompt:
        ids = self._encoder.encode_chat(chat(question, self._questions.examples, self._questions.system))
        return Prompt(position, tuple(ids), question)


def chat(question: Question, examples: Iterable[Question], system: str | None) -> list[dict[str, str]]:
    """The messages of a prompt: system text, each example as a turn with its answer, then the question."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for example in examples:
        messages.append({"role": "user", "content": example.text})
        messages.append({"role": "assistant", "content": example.answer})
    return [*messages, {"role": "user", "content": question.text}]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many distinct questions to take of each kind; train is an upper bound, the others are exact."""

    train: int
    heldout: int
    examples: int


def split(
    train: Iterable[Question],
    heldout: Iterable[Question],
    examples: Iterable[Question],
    sizes: Sizes,
    *,
    name: str,
    system: str | None = None,
    patience: int | None = None,
) -> QuestionSet:
    """Draw distinct questions from three streams, so that no text appears in two of the three sets.

    Examples are drawn first, then the held-out set, then training. A stream also ends after `patience` repeats in a
    row: a generator with few different questions never ends by itself. InvalidInput, with `name`, when one ends too
    early.
    """
    seen: set[str] = set()
    drawn = {
        kind: tuple(islice(unseen(stream, seen, patience), wanted))
        for kind, stream, wanted in (
            ("examples", examples, sizes.examples),
            ("heldout", heldout, sizes.heldout),
            ("train", train, sizes.train),
        )
    }
    for kind, needed in (("examples", sizes.examples), ("heldout", sizes.heldout), ("train", 1)):
        if len(drawn[kind]) < needed:
            raise InvalidInput(
                f"{name} has only {len(drawn[kind])} distinct {kind} questions, {needed} are needed",
                remedy="ask for fewer, or widen the task so that it has more different questions",
                field="prompts",
            )
    return QuestionSet(drawn["train"], drawn["heldout"], drawn["examples"], system)


def unseen(stream: Iterable[Question], seen: set[str], patience: int | None) -> Iterator[Question]:
    """Questions whose text, up to spacing and case, is not in `seen`; each is added to it.

    Ends after `patience` repeats in a row, where it is given.
    """
    repeats = 0
    for question in stream:
        key = " ".join(question.text.casefold().split())
        if key in seen:
            repeats += 1
            if repeats == patience:
                return
            continue
        repeats = 0
        seen.add(key)
        yield question
