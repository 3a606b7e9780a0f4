"""Balanced tasks: no single answer scores well by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nereus_common.rl.prompts import Question, Sizes
from nereus_common.rl.sources import TaskSource

WORDS = {"min_words": 1, "max_words": 2}


def commonest(questions: Sequence[Question]) -> float:
    """The share of the commonest answer."""
    return Counter(question.answer for question in questions).most_common(1)[0][1] / len(questions)


def test_balanced_questions_have_no_answer_that_scores_well_by_itself() -> None:
    sizes = Sizes(200, 200, 3)
    skewed = TaskSource("letter_counting", WORDS, sizes).open(0)
    even = TaskSource("letter_counting", WORDS, sizes, balanced=True).open(0)
    assert commonest(skewed.heldout) > 0.7 and commonest(skewed.train) > 0.7
    assert commonest(even.heldout) < 0.36 and commonest(even.train) < 0.36
    texts = {question.text for question in (*even.train, *even.heldout, *even.examples)}
    assert (len(even.heldout), len(even.train), len(texts)) == (200, 200, 403)


def test_balanced_questions_depend_on_the_seed_alone() -> None:
    source = TaskSource("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 2}, Sizes(30, 20, 3), balanced=True)
    asked = source.open(1)
    assert asked == source.open(1) and asked.heldout != source.open(2).heldout
