"""The demo's model: a GGUF file in a package becomes a Hugging Face folder, once and whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from nereus.models import materialise, with_local_models
from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.engines.convert import PackagedModel, gguf_file
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.rl.prompts import Question, chat


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return materialise("demo:smollm2", models)


def test_the_folder_is_a_tied_llama_in_bfloat16_without_quantization(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 30, True)
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        names = set(tensors.keys())
        embedding = tensors.get_slice("model.embed_tokens.weight")
        assert (embedding.get_dtype(), embedding.get_shape()) == ("BF16", [49152, 576])
    assert "lm_head.weight" not in names


def test_it_is_converted_once_and_nothing_else_is_left(folder: Path, models: Path) -> None:
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert materialise("demo:smollm2", models) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(models.iterdir()) == [folder]


def test_a_job_that_names_the_package_gets_the_folder(folder: Path, models: Path) -> None:
    spec = JobSpec.from_dict({"model": "demo:smollm2", "prompts": {"task": "gcd"}, "rewards": ["exact_answer"]})
    assert with_local_models(spec, models).models["actor"].path == str(folder)


def test_a_chat_ends_where_the_answer_begins(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    ids = tokenizer.encode_chat(chat(Question("two?"), [Question("one?", "1")], None))
    assert tokenizer.decode(ids).endswith("user\none?\nassistant\n1\nuser\ntwo?\nassistant\n")
    assert tokenizer.eos_token_id in ids
    assert tokenizer.decode([tokenizer.eos_token_id]) == ""


def test_an_unknown_model_and_a_missing_package_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no model 'demo:gpt'"):
        materialise("demo:gpt", tmp_path)
    with pytest.raises(NotFound, match="no-such-package is not installed"):
        gguf_file(PackagedModel("no-such-package", "x"))
    with pytest.raises(NotFound, match="holds no tokenizer"):
        ChatTokenizer(tmp_path)


def test_the_conversion_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nereus_common.engines.convert", "demo:gpt", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("there is no model 'demo:gpt'") and len(done.stderr.splitlines()) == 1
