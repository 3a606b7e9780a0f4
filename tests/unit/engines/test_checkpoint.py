"""What is read from a model folder, and what is said when something is not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box

torch = pytest.importorskip("torch")

NORM, SCORE = TensorName("model.norm.weight"), TensorName("score.weight")


def save(folder: Path, *, indexed: bool, score: int = 0) -> Path:
    """A norm [4], and a score head of that many rows, in one file or in two with an index."""
    from safetensors.torch import save_file

    tensors = {NORM: torch.arange(4.0), **({SCORE: torch.ones(score, 4)} if score else {})}
    files = {
        name: f"model-{number}.safetensors" if indexed else "model.safetensors" for number, name in enumerate(tensors)
    }
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def empty_shard(name: TensorName, shape: tuple[int, ...], rows: int | None = None) -> object:
    from nereus_common.engines.torch_model.shards import Shard

    box = Box.whole(shape) if rows is None else Box((0,) * len(shape), (rows, *shape[1:]))
    return Shard(name, name, shape, box, torch.full(box.shape, torch.nan))


def load(folder: Path, *shards: object, new_head: bool = False) -> None:
    from nereus_common.engines.torch_model.checkpoint import load_shards

    load_shards(folder, shards, new_head=new_head)  # type: ignore[arg-type]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_new_score_head_starts_at_zero_and_says_so_once(
    indexed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    norm, score, nothing = empty_shard(NORM, (4,)), empty_shard(SCORE, (1, 4)), empty_shard(SCORE, (1, 4), rows=0)
    load(save(tmp_path, indexed=indexed), norm, score, nothing, new_head=True)
    assert norm.local.tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert score.local.tolist() == [[0, 0, 0, 0]]  # type: ignore[attr-defined]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} has no score.weight: the head starts at zero"
    ]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("new_head", [False, True])
def test_a_score_head_that_is_there_is_taken(indexed: bool, new_head: bool, tmp_path: Path) -> None:
    score = empty_shard(SCORE, (1, 4))
    load(save(tmp_path, indexed=indexed, score=1), score, new_head=new_head)
    assert score.local.tolist() == [[1, 1, 1, 1]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("indexed", "file"), [(False, "model.safetensors"), (True, "model.safetensors.index.json")])
def test_a_head_that_is_missing_and_not_to_be_new_is_refused_by_file(indexed: bool, file: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(save(tmp_path, indexed=indexed), empty_shard(SCORE, (1, 4)))
    assert str(caught.value).startswith(f"{tmp_path / file} holds no tensor score.weight (")


def test_only_the_head_may_be_new(tmp_path: Path) -> None:
    missing = empty_shard(TensorName("model.embed_tokens.weight"), (9, 4))
    with pytest.raises(InvalidInput, match=r"holds no tensor model\.embed_tokens\.weight"):
        load(save(tmp_path, indexed=False), missing, new_head=True)


def test_a_head_of_several_rows_is_refused_by_shape(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"score\.weight has shape \(2, 4\)"):
        load(save(tmp_path, indexed=False, score=2), empty_shard(SCORE, (1, 4)), new_head=True)
