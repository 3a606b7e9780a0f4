"""A model's own tokenizer, for the two things a job needs: chats to ids, once, and sampled ids to text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput, NotFound

_IMPORTING = threading.Lock()
"""transformers fills its own module as names are asked for: two threads that do so at first fail, one of them."""


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder. NotFound when there is none, InvalidInput without a chat template."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer_config.json").is_file():
            raise NotFound(f"{folder} holds no tokenizer", remedy="point to a Hugging Face folder", path=folder)
        with _IMPORTING:
            from transformers import AutoTokenizer

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
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; for rewards and people, never encoded again."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))
