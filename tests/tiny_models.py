"""Tiny random models as Hugging Face folders, with a tokenizer, for tests that run the real engines."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<eos>", "<user>", "<assistant>", "<system>")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""vLLM's CPU attention takes heads of 32 and more."""


def save_tiny_model(folder: Path, *, tied: bool = True, kind: str = "llama", seed: int = 5) -> Path:
    """A random two-layer model of `kind` and a character tokenizer; the same arguments give the same bits."""
    from transformers import AutoModelForCausalLM

    return _save(folder, AutoModelForCausalLM, kind, seed, {"tie_word_embeddings": tied})


def save_tiny_reward_model(folder: Path, *, kind: str = "llama", seed: int = 7, labels: int = 1) -> Path:
    """The same as a sequence classifier: a decoder with `score.weight` [labels, hidden] on top."""
    from transformers import AutoModelForSequenceClassification

    return _save(folder, AutoModelForSequenceClassification, kind, seed, {"num_labels": labels})


def _save(folder: Path, model_class: Any, kind: str, seed: int, changes: dict[str, Any]) -> Path:
    import torch
    from transformers import AutoConfig

    tokenizer = _tokenizer()
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
        **HEADS,
        **changes,
    }
    torch.manual_seed(seed)
    model = model_class.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """One token per printable character."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, "<unk>", *string.printable))}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", additional_special_tokens=list(SPECIAL[1:])
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
