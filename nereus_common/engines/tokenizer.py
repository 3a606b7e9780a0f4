"""A model's own tokenizer, for what a job needs: chats to ids, once, sampled ids to text, observations to ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput, NotFound

_RESPONSE = "<the response of this turn>"
"""Stands for a sampled response where the chat template is rendered for what follows one."""
_IMPORTING = threading.Lock()
"""transformers fills its own module as names are asked for: two threads that do so at first fail, one of them."""


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder. NotFound when there is none, InvalidInput without a chat template."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer_config.json").is_file():
            raise NotFound(f"{folder} holds no tokenizer", remedy="point to a Hugging Face folder", path=folder)
        with _IMPORTING:
            from transformers import AutoTokenizer

        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise InvalidInput(
                f"the tokenizer in {folder} has no chat template", remedy="use an instruct model", field="models.actor"
            )

    @property
    def eos_token_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self._ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; for rewards and people, never encoded again."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))

    def observation_ids(self, text: str) -> list[int]:
        """Token ids of `text` as the user's answer to a sampled response, up to where the next response begins.

        They follow the response's ids as they are: the end-of-turn token that was sampled is not repeated. Special
        tokens that are spelled out in `text` are left out, or an environment that echoes the model would let it begin
        turns of its own. InvalidInput when the chat template does not close a turn with the tokenizer's EOS token, or
        writes a turn differently by its place in the dialogue.
        """
        if not self._turns_are_even:
            raise self._no_dialogue("writes a turn differently by its place in the dialogue")
        return self._ids(self._after_response(self._without_special(text)))

    @cached_property
    def _turns_are_even(self) -> bool:
        return self._after_response("text") == self._after_response("text", earlier=2)

    def _after_response(self, text: str, earlier: int = 0) -> str:
        """What the template writes after a response's end-of-turn token, after `earlier` other rounds."""
        from jinja2 import TemplateError

        rounds = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * earlier
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _RESPONSE}]
        chat = [*rounds, *turn, {"role": "user", "content": text}]
        try:
            rendered = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except TemplateError as wrong:
            raise self._no_dialogue(f"refuses a second turn: {wrong}") from wrong
        _, found, after = str(rendered).partition(_RESPONSE)
        end = str(self._tokenizer.eos_token)
        if not found:
            raise self._no_dialogue("leaves out or rewrites earlier responses")
        if not after.lstrip().startswith(end):
            raise self._no_dialogue(f"does not close a response with the EOS token {end!r} but goes on {after[:20]!r}")
        return after.lstrip().removeprefix(end)

    def _without_special(self, text: str) -> str:
        while any(token in text for token in self._special):
            for token in self._special:
                text = text.replace(token, "")
        return text

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _no_dialogue(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"the chat template in {self._folder} {what}: no dialogue can be continued token by token",
            remedy="use a model whose template ends each turn with eos_token, set that in its tokenizer_config.json, "
            "or give the job no environment",
            field="models.actor",
        )
