"""Question sets from reasoning-gym tasks and from JSONL and Parquet files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.rl.order import permuted
from nereus_common.rl.prompts import Question, QuestionSet, Sizes, split, unseen

_DRAWS_PER_QUESTION = 20
_BALANCED_DRAWS = 10_000
"""At least so many where rare answers are looked for."""
_PATIENCE = 1000
"""How often in a row a generator may repeat itself before its task counts as exhausted."""

_STREAMS = 3
"""Training, held-out questions and examples come from generator seeds of their own, which no job seed shares."""
_SEEDS = 1 << 31
"""Of all generators, some take no larger seed."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A reasoning-gym task; `params` are the fields of its config.

    `balanced`: of twenty times as many questions, and 10,000 at least, those are taken that spread the answers most
    evenly: all of a rare answer, and equally many of the others. Which they are depends on the seed alone. The held-out
    set is drawn first: where a task has few questions in all, it leaves none of the rarest answers for training.
    """

    task: str
    params: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=lambda: Sizes(train=4096, heldout=200, examples=0))
    system: str | None = None
    balanced: bool = False

    def open(self, seed: int) -> QuestionSet:
        """Generate the questions; InvalidInput names an unknown task or parameter."""
        sizes = self.sizes
        train, heldout, examples = (
            self._stream(_generator_seed(seed * _STREAMS + stream), wanted)
            for stream, wanted in enumerate((sizes.train, sizes.heldout, sizes.examples))
        )
        return split(
            self._spread(train),
            self._spread(heldout),
            varied(examples),
            sizes,
            name=f"task {self.task}",
            system=self.system,
            patience=_PATIENCE,
        )

    def _spread(self, stream: Iterator[Question]) -> Iterable[Question]:
        return varied(unseen(stream, set(), _PATIENCE)) if self.balanced else stream

    def _stream(self, seed: int, wanted: int) -> Iterator[Question]:
        draws = max(wanted * _DRAWS_PER_QUESTION + 1, _BALANCED_DRAWS if self.balanced else 0)
        dataset = _create_dataset(self.task, {**self.params, "seed": seed, "size": draws})
        for entry in dataset:
            yield Question(str(entry["question"]), str(entry["answer"]), {**entry["metadata"], "task": self.task})


def _generator_seed(stream: int) -> int:
    """Far from every other stream's: question i depends on seed + i alone, so that neighbours would ask the same."""
    return permuted(stream % _SEEDS, _SEEDS, key=0)


def varied(questions: Iterable[Question]) -> list[Question]:
    """The same questions, those with an answer not seen before first, then those that repeat one once, and so on.

    However many are taken, no answer is taken more often than another that still has questions left, but for one.
    """
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, Question]] = []
    for question in questions:
        ranked.append((seen[question.answer], question))
        seen[question.answer] += 1
    return [question for _, question in sorted(ranked, key=lambda entry: entry[0])]


def _create_dataset(task: str, params: dict[str, Any]) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise InvalidInput(f"reasoning-gym has no task {task!r}", field="prompts.task")
    try:
        return create_dataset(task, **params)
    except (TypeError, AssertionError, ValueError) as wrong:
        raise InvalidInput(f"task {task}: {wrong}", remedy="see the task's config", field="prompts.params") from wrong


@dataclass(frozen=True, slots=True)
class FileSource:
    """Rows of a .jsonl or .parquet file; columns other than the question and the answer become metadata.

    The file's order is kept: first the examples, then the held-out questions, then training.
    """

    path: Path
    question: str = "question"
    answer: str = "answer"
    sizes: Sizes = field(default_factory=lambda: Sizes(train=1 << 62, heldout=0, examples=0))
    system: str | None = None

    def open(self, seed: int) -> QuestionSet:
        """Read the questions, the same under every seed; NotFound and InvalidInput name file, row and column."""
        if not self.path.is_file():
            raise NotFound(f"prompt file {self.path} does not exist", field="prompts.file", path=self.path)
        rows = self._questions()
        return split(rows, rows, rows, self.sizes, name=str(self.path), system=self.system)

    def _questions(self) -> Iterator[Question]:
        for number, row in enumerate(_rows(self.path), start=1):
            if not isinstance(row, dict) or not isinstance(row.get(self.question), str):
                raise InvalidInput(
                    f"{self.path}: row {number} has no text in {self.question!r}",
                    remedy="name the column with prompts.question",
                    field="prompts.question",
                )
            rest = {key: value for key, value in row.items() if key not in (self.question, self.answer)}
            yield Question(row[self.question], str(row.get(self.answer, "")), rest)


def _rows(path: Path) -> Iterator[Any]:
    match path.suffix:
        case ".jsonl":
            return _jsonl_rows(path)
        case ".parquet":
            return _parquet_rows(path)
        case other:
            raise InvalidInput(f"{path}: {other!r} files hold no prompts", remedy="give .jsonl or .parquet")


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as wrong:
                    raise InvalidInput(f"{path}:{number} is not JSON: {wrong}", field="prompts.file") from wrong


def _parquet_rows(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except ArrowInvalid as wrong:
        raise InvalidInput(f"{path} is not Parquet: {wrong}", field="prompts.file") from wrong
    for batch in table.iter_batches():
        yield from batch.to_pylist()
