"""Questions from tasks and files, and errors that say what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.rl.prompts import Question, Sizes
from nereus_common.rl.sources import FileSource, TaskSource, varied

pytestmark = pytest.mark.fast

WORDS = {"min_words": 1, "max_words": 2}
ROWS = [{"question": f"what is {number}?", "answer": number, "kind": "echo"} for number in range(9)]


def test_a_task_gives_the_same_questions_for_the_same_seed_and_others_for_another() -> None:
    source = TaskSource("letter_counting", WORDS, Sizes(30, 20, 3))
    assert source.open(1) == source.open(1)
    assert source.open(1).heldout != source.open(2).heldout


def test_neighbouring_seeds_ask_other_questions() -> None:
    # an item of reasoning-gym depends on seed + index: a plain next seed would only shift them by one
    asked = [TaskSource("letter_counting", WORDS, Sizes(100, 20, 3)).open(seed) for seed in range(3)]
    texts = [{question.text for question in one.train} for one in asked]
    assert all(len(texts[number] & texts[number + 1]) < 10 for number in range(2))


def test_heldout_questions_of_a_task_are_never_trained_on() -> None:
    asked = TaskSource("letter_counting", WORDS, Sizes(300, 200, 3)).open(0)
    trained = {question.text for question in asked.train}
    assert len(asked.heldout) == 200
    assert not trained & {question.text for question in (*asked.heldout, *asked.examples)}


def test_a_task_with_too_few_different_questions_is_refused() -> None:
    with pytest.raises(InvalidInput, match="task count_bits has only"):
        TaskSource("count_bits", {"min_n": 1, "max_n": 15}, Sizes(10, 200, 3)).open(0)


@pytest.mark.parametrize(
    ("source", "field"),
    [(TaskSource("leter_counting"), "prompts.task"), (TaskSource("gcd", {"min_number": 1}), "prompts.params")],
)
def test_an_unknown_task_or_parameter_is_named(source: TaskSource, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        source.open(0)
    assert refused.value.details["field"] == field


def test_examples_with_different_answers_come_first() -> None:
    asked = [Question(text, answer) for text, answer in [("a", "1"), ("b", "1"), ("c", "2"), ("d", "1"), ("e", "3")]]
    assert [question.text for question in varied(asked)] == ["a", "c", "e", "b", "d"]


@given(st.lists(st.sampled_from("aaaaabbc")), st.integers(0, 20))
def test_no_answer_is_taken_more_often_than_one_that_has_questions_left(answers: list[str], wanted: int) -> None:
    asked = [Question(f"{number}", answer) for number, answer in enumerate(answers)]
    taken = Counter(question.answer for question in varied(asked)[:wanted])
    there = Counter(answers)
    left = [taken[answer] for answer in there if taken[answer] < there[answer]]
    assert not left or max(taken.values(), default=0) <= min(left) + 1
    assert sorted(question.text for question in varied(asked)) == sorted(question.text for question in asked)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_a_file_become_examples_then_heldout_then_training(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    asked = FileSource(path, sizes=Sizes(100, 3, 2)).open(0)
    assert [len(part) for part in (asked.examples, asked.heldout, asked.train)] == [2, 3, 4]
    assert asked.examples[0] == Question("what is 0?", "0", {"kind": "echo"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"question": "a"}\n{', r"bad.jsonl:2 is not JSON"),
        ("column.jsonl", '{"ask": "a"}', r"column.jsonl: row 1 has no text in 'question'"),
        ("bad.parquet", "PAR", r"bad.parquet is not Parquet"),
        ("rows.csv", "a,b", r"'.csv' files hold no prompts"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=message):
        FileSource(tmp_path / name, sizes=Sizes(2, 0, 0)).open(0)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        FileSource(tmp_path / "none.jsonl").open(0)
