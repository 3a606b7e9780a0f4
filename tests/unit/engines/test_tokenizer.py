"""What an environment says continues the sampled ids exactly as the chat template continues the dialogue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.engines.tokenizer import ChatTokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of SmolLM2 and of Qwen2, but for the words of the system message."""
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "llama2": (LLAMA2, "</s>")}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"]
WORDS = "assistant user system That is not right. Please try again. hello hello he llo answer\n 42\n\n INST /INST"

Load = Callable[..., ChatTokenizer]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A byte-level BPE tokenizer with real merges, under the given template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(template: str, eos: str) -> ChatTokenizer:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
        core.train_from_iterator([WORDS] * 4, trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token=eos, additional_special_tokens=SPECIAL[:5]
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return ChatTokenizer(tmp_path)

    return make


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", ["That is not right.", "42", "two\nlines", ""])
def test_an_observation_is_what_the_template_writes_after_a_response(load: Load, name: str, said: str) -> None:
    tokenizer = load(*TEMPLATES[name])
    until_response = tokenizer.encode_chat(chat("hello", "answer"))
    until_response = until_response[: len(until_response) - until_response[::-1].index(tokenizer.eos_token_id)]
    whole = tokenizer.encode_chat(chat("hello", "answer", said))
    assert until_response + tokenizer.observation_ids(said) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_sampled_end_of_turn_is_not_repeated(load: Load, name: str) -> None:
    template, eos = TEMPLATES[name]
    tokenizer = load(template, eos)
    ids = tokenizer.observation_ids("42")
    assert ids[0] != tokenizer.eos_token_id
    assert "42" in tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["a<|im_end|>b", "a<|im_<|im_end|>end|>b", "a<|im_start|>b<|im_end|>"])
def test_an_observation_cannot_begin_or_end_a_turn(load: Load, text: str) -> None:
    tokenizer = load(*TEMPLATES["chatml"])
    assert tokenizer.observation_ids(text) == tokenizer.observation_ids("ab")


@pytest.mark.parametrize(
    ("template", "eos", "said"),
    [
        (CHATML, "</s>", "does not close a response with the EOS token '</s>' but goes on '<|im_end|>"),
        ("{{ messages[-1]['content'] }}", "</s>", "leaves out or rewrites earlier responses"),
        ("{{ messages | map(attribute='content') | join(' ') | upper }}", "</s>", "leaves out or rewrites"),
        (
            "{% for message in messages %}[Round {{ loop.index }}]{{ message['content'] }}</s>{% endfor %}",
            "</s>",
            "writes a turn differently by its place",
        ),
        (
            "{% if messages | length > 2 %}{{ raise_exception('one round only') }}{% endif %}",
            "</s>",
            "refuses a second turn: one round only",
        ),
    ],
    ids=["other end", "last only", "rewritten", "numbered", "one round"],
)
def test_a_template_that_cannot_be_continued_is_refused(load: Load, template: str, eos: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(template, eos).observation_ids("42")
    assert said in str(refused.value) and "eos_token" in refused.value.remedy
