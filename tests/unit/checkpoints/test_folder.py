"""A checkpoint is complete or it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.manifest import read_manifest
from nereus_common.core.errors import Conflict, NotFound, VerificationFailed
from tests.unit.checkpoints.checkpoint_cases import manifest, save

pytestmark = pytest.mark.fast


def test_only_a_committed_folder_is_seen_and_the_newest_is_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 100_000_000, 12):
        save(tmp_path, step)
    folders.begin(tmp_path, 200_000_000, ["actor"])
    assert list(folders.complete(tmp_path)) == [9, 12, 100_000_000]
    assert folders.find(tmp_path).name == "step-100000000"
    assert folders.find(tmp_path, 9).name == "step-00000009"


def test_the_next_beginning_sweeps_what_was_left_unfinished(tmp_path: Path) -> None:
    folders.begin(tmp_path, 5, ["actor", "critic"])
    folders.begin(tmp_path, 6, ["actor"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006.partial"]


def test_pruning_keeps_the_newest_and_nothing_unfinished(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    (tmp_path / "step-00000003.pruned.partial").mkdir()
    (tmp_path / "notes").mkdir()
    folders.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000003", "step-00000004"]


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(Conflict, match="step 3 already"):
        folders.begin(tmp_path, 3, ["actor"])


def test_a_step_that_is_not_there_is_told_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="none yet"):
        folders.find(tmp_path / "nowhere")
    save(tmp_path, 3)
    with pytest.raises(NotFound, match="those of steps 3"):
        folders.find(tmp_path, 4)


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    assert read_manifest(folder) == manifest(7, dict(read_manifest(folder).models))
    with pytest.raises(NotFound, match="it holds actor"):
        read_manifest(folder).model("critic")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"format": 1', '"format": 2', "format is 2, this version reads 1"),
        ('"step": 7', '"step": -7', "step is not a whole number"),
        ('"step": 7', '"steps": 7', "the file is an object without step"),
        ('"exp_avg":', '"exp":', r"models.actor.digests is an object without exp_avg"),
        ("{", "", "is not JSON"),
    ],
)
def test_a_damaged_manifest_names_file_and_field(before: str, after: str, said: str, tmp_path: Path) -> None:
    path = save(tmp_path, 7) / "manifest.json"
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(VerificationFailed, match=said) as refused:
        read_manifest(path.parent)
    assert str(path) in str(refused.value)
