"""Question sets are disjoint, and a prompt's ids are made once, in the global order."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.order import SampleOrder
from nereus_common.rl.prompts import OrderedPrompts, Question, QuestionSet, Sizes, chat, split

pytestmark = pytest.mark.fast


class WordEncoder:
    """Ids by word, with a separator; enough to see which messages a prompt was made of."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        words = [word for message in messages for word in (message["role"], *message["content"].split())]
        return [self.words.setdefault(word, len(self.words)) for word in words]


def questions(texts: list[str]) -> list[Question]:
    return [Question(text, text.upper()) for text in texts]


texts = st.lists(st.sampled_from([f"{letter} {number}" for letter in "abc" for number in range(8)]), max_size=30)


@given(texts, texts, texts)
def test_no_text_is_in_two_of_the_three_sets(train: list[str], heldout: list[str], examples: list[str]) -> None:
    try:
        cut = split(questions(train), questions(heldout), questions(examples), Sizes(10, 5, 2), name="test")
    except InvalidInput:
        return
    all_texts = [question.text for part in (cut.train, cut.heldout, cut.examples) for question in part]
    assert len(all_texts) == len(set(all_texts))
    assert (len(cut.heldout), len(cut.examples)) == (5, 2)


def test_texts_that_differ_in_case_and_spacing_are_the_same_question() -> None:
    with pytest.raises(InvalidInput, match="only 0 distinct train questions"):
        split(questions(["What  is IT"]), questions(["what is it"]), [], Sizes(1, 1, 0), name="test")


def test_a_stream_that_ends_too_early_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="task tiny has only 1 distinct heldout questions, 2 are needed"):
        split(questions(["a"]), questions(["b"]), [], Sizes(1, 2, 0), name="task tiny")


def test_a_stream_that_only_repeats_itself_ends() -> None:
    train = chain(questions(["a", "b"]), repeat(Question("a")))
    cut = split(train, questions(["c"]), [], Sizes(100, 1, 0), name="test", patience=50)
    assert [question.text for question in cut.train] == ["a", "b"]


def test_a_prompt_is_system_then_solved_examples_then_the_question() -> None:
    messages = chat(Question("three?"), [Question("one?", "1"), Question("two?", "2")], "be brief")
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "be brief"),
        ("user", "one?"),
        ("assistant", "1"),
        ("user", "two?"),
        ("assistant", "2"),
        ("user", "three?"),
    ]


def test_prompts_follow_the_global_order() -> None:
    asked = QuestionSet(tuple(questions(["p", "q", "r", "s"])), tuple(questions(["h"])))
    prompts = OrderedPrompts(asked, WordEncoder(), seed=3)
    batch = prompts.batch(range(2, 6))
    order = SampleOrder(4, 3)
    assert [prompt.position for prompt in batch] == [2, 3, 4, 5]
    assert [prompt.question.text for prompt in batch] == ["pqrs"[order.index(position)] for position in range(2, 6)]
    assert [prompt.question.text for prompt in prompts.heldout()] == ["h"]


def test_the_same_position_has_the_same_ids_in_every_epoch_of_the_process() -> None:
    asked = QuestionSet(tuple(questions(["a b", "c d", "e f"])), ())
    prompts = OrderedPrompts(asked, WordEncoder(), seed=0)
    assert prompts.at(1).token_ids == prompts.at(1).token_ids
