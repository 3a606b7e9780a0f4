"""An export is whole, verified, and never overwrites."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from nereus_common.checkpoints.export import export
from nereus_common.core.errors import Conflict, InvalidInput, NotFound, VerificationFailed
from tests.unit.checkpoints.checkpoint_cases import save
from tests.unit.checkpoints.test_index import whole_state

pytestmark = pytest.mark.fast


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder as far as export looks at it."""
    folder = tmp_path / "source"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "vocab_size": 13}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_text("old weights")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_an_export_holds_parameters_config_and_tokenizer_and_nothing_else(source: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "root", 5, source=str(source))
    done = export(checkpoint, tmp_path / "out")
    assert (done.step, done.dtype, done.files) == (5, "float32", ("model.safetensors",))
    assert sorted(path.name for path in done.folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((done.folder / "config.json").read_text())
    assert config == {"architectures": ["LlamaForCausalLM"], "vocab_size": 13, "dtype": "float32"}
    found = load_file(done.folder / "model.safetensors")
    assert sorted(found) == sorted(whole_state())
    for name, state in whole_state().items():
        np.testing.assert_array_equal(found[name], state.parameter)


def test_a_large_model_is_cut_into_files_with_an_index(source: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "root", 5, source=str(source))
    done = export(checkpoint, tmp_path / "out", dtype="bfloat16", shard_bytes=1000)
    assert len(done.files) > 2
    assert all((done.folder / file).stat().st_size < 3000 for file in done.files)
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes
    assert sorted(index["weight_map"]) == sorted(whole_state())


def test_an_export_does_not_overwrite(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="source exists"):
        export(save(tmp_path / "root", 5, source=str(source)), source)


def test_what_cannot_be_exported_leaves_nothing(source: Path, tmp_path: Path) -> None:
    checkpoint, out = save(tmp_path / "root", 5, source=str(source)), tmp_path / "out"
    with pytest.raises(InvalidInput, match="one of float32, bfloat16, float16"):
        export(checkpoint, out, dtype="int8")
    with pytest.raises(NotFound, match="it holds actor"):
        export(checkpoint, out, model="critic")
    file = checkpoint / "actor" / "rank-0000.safetensors"
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    content[8 + header] ^= 1  # the first parameter's first byte
    file.write_bytes(content)
    with pytest.raises(VerificationFailed, match="not those that were saved"):
        export(checkpoint, out)
    (source / "config.json").unlink()
    with pytest.raises(NotFound, match=r"config.json"):
        export(checkpoint, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "source"]
