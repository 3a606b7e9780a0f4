"""Any box reads back bit for bit, whatever layout wrote it; damage is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from nereus_common.checkpoints.reader import CheckpointReader
from nereus_common.checkpoints.state import Digests
from nereus_common.core.errors import NotFound, VerificationFailed
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import EMBEDDING, FINAL_NORM
from nereus_common.state.conventions import TRAINING
from nereus_common.state.oracle import unit_boxes
from tests.unit.checkpoints.checkpoint_cases import save
from tests.unit.checkpoints.test_index import LAYOUTS, SHAPE, whole_state

pytestmark = pytest.mark.fast


@settings(max_examples=15, deadline=None)
@given(source=st.sampled_from(LAYOUTS), target=st.sampled_from(LAYOUTS))
def test_every_rank_of_any_layout_reads_its_boxes_bit_for_bit(
    source: str, target: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, whole = save(tmp_path_factory.mktemp("root"), 1, source), whole_state()
    with CheckpointReader(folder, "actor") as reader:
        for held in unit_boxes(SHAPE, Layout.parse(target), TRAINING):
            for name, boxes in held.items():
                for box in boxes:
                    found, wanted = reader.state(name, whole[name].shape, box), whole[name]
                    assert found.updates == wanted.updates
                    for one, other in zip(found.tensors().values(), wanted.tensors().values(), strict=True):
                        np.testing.assert_array_equal(one.view(np.uint32), other[box.slices].view(np.uint32))


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    folder, whole = save(tmp_path, 1, "tp1.pp1.fs1"), whole_state()
    stored = load_file(folder / "actor" / "rank-0000.safetensors")
    assert len(stored) == 3 * len(whole)
    for state in whole.values():
        for name, array in state.tensors().items():
            np.testing.assert_array_equal(stored[name], array)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    return save(tmp_path, 1)


def read_all(folder: Path) -> Digests:
    with CheckpointReader(folder, "actor") as reader:
        shapes = {name: one.shape for name, one in SHAPE.tensors().items()}
        return Digests.of(reader.state(name, shape, Box.whole(shape)) for name, shape in shapes.items())


def test_a_flipped_bit_shows_in_the_digest_of_what_was_read(damaged: Path) -> None:
    with CheckpointReader(damaged, "actor") as reader:
        saved = reader.entry.digests
    assert read_all(damaged) == saved
    file = damaged / "actor" / "rank-0001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    assert read_all(damaged).differing(saved)


def test_a_missing_file_is_named(damaged: Path) -> None:
    (damaged / "actor" / "rank-0002.safetensors").unlink()
    with pytest.raises(NotFound, match=r"rank-0002.safetensors"):
        read_all(damaged)


def test_a_truncated_file_is_named(damaged: Path) -> None:
    file = damaged / "actor" / "rank-0002.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(VerificationFailed, match=r"rank-0002.safetensors"):
        read_all(damaged)


def test_a_file_in_the_place_of_another_is_named(damaged: Path) -> None:
    shutil.copy(damaged / "actor" / "rank-0003.safetensors", damaged / "actor" / "rank-0000.safetensors")
    with pytest.raises(VerificationFailed, match=r"rank-0000.safetensors"):
        read_all(damaged)


def test_an_edited_index_is_refused(damaged: Path) -> None:
    index = damaged / "actor" / "index.json"
    index.write_text(index.read_text().replace(":4", ":5"))
    with pytest.raises(VerificationFailed, match=r"index.json is not the file that was written"):
        CheckpointReader(damaged, "actor")


def test_a_model_of_another_shape_is_refused(damaged: Path) -> None:
    with CheckpointReader(damaged, "actor") as reader:
        with pytest.raises(VerificationFailed, match=r"the model's is \(13,\)"):
            reader.read(FINAL_NORM, (13,), Box.whole((13,)))
        with pytest.raises(VerificationFailed, match=r"not there whole"):
            reader.read(EMBEDDING, (13, 12), Box((0, 0), (14, 12)))
