from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nereus_common.core.errors import NotFound, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.engines.generation.folder import read_boxes
from nereus_common.engines.generation.staging import Staging, check_cover
from nereus_common.state.digest import digest_box
from nereus_common.transport import PullItem

pytestmark = pytest.mark.fast
NAME = TensorName("w")
HELD = Box((2, 0), (6, 4))
NEGATIVE_ZERO = 0x8000


def _staging() -> Staging:
    return Staging(1, "bfloat16", {NAME: (8, 4)}, {NAME: (HELD,)})


def test_pieces_in_any_order_make_up_the_box() -> None:
    staging = _staging()
    whole = np.arange(16, dtype=np.uint16).reshape(4, 4)
    for first in (4, 2):
        box = Box((first, 0), (first + 2, 4))
        staging.fill(NAME, box, whole[first - 2 : first].reshape(-1).view(np.uint8))
    ((box, array),) = staging.boxes(NAME)
    assert box == HELD
    np.testing.assert_array_equal(array, whole)
    assert staging.digests() == {NAME: digest_box(NAME, (8, 4), HELD, whole)}


def test_a_piece_nobody_asked_for_is_refused() -> None:
    with pytest.raises(VerificationFailed, match="not asked for"):
        _staging().fill(NAME, Box((0, 0), (2, 4)), np.zeros(16, np.uint8))


def test_only_the_sign_of_zeros_and_subnormals_is_taken_from_staging() -> None:
    staging = _staging()
    staged = np.full((4, 4), 0x3F80, np.uint16)
    staged[0] = [NEGATIVE_ZERO, 0x0001, 0x3F80, 0]
    staging.fill(NAME, HELD, staged.reshape(-1).view(np.uint8))
    read = staged.copy()
    read[0] = [0, 0, 0, 0]  # a product shows zeros; the third was no zero
    read[1, 1] = 0x4000
    shown = staging.shown_bits(NAME, HELD, read)
    assert shown[0].tolist() == [NEGATIVE_ZERO, 0x0001, 0, 0]
    assert shown[1, 1] == 0x4000


@pytest.mark.parametrize(
    "offered",
    [
        {},
        {NAME: (Box((2, 0), (5, 4)),)},
        {NAME: (HELD, Box((2, 0), (3, 4)))},
        {NAME: (Box((2, 0), (7, 4)),)},
        {NAME: (HELD,), TensorName("other"): (Box((0,), (1,)),)},
    ],
    ids=["nothing", "too little", "twice", "too much", "another tensor"],
)
def test_boxes_that_do_not_cover_exactly_are_refused(offered: dict[TensorName, tuple[Box, ...]]) -> None:
    with pytest.raises(VerificationFailed):
        check_cover({NAME: (HELD,)}, offered)


def test_boxes_cut_by_several_sources_cover() -> None:
    check_cover({NAME: (HELD,)}, {NAME: (Box((2, 0), (4, 4)), Box((4, 0), (6, 1)), Box((4, 1), (6, 4)))})


def test_a_folder_gives_the_slices_rounded_to_the_wire_dtype(tmp_path: Path) -> None:
    weight = torch.randn(8, 4)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    staging = _staging()
    items = (PullItem(NAME, HELD, RankRef("u", 0), b""),)
    moved, _ = read_boxes(tmp_path, items, torch.bfloat16, staging.fill)
    ((_, array),) = staging.boxes(NAME)
    assert moved == 32
    assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), weight[2:6].bfloat16())


def test_a_folder_without_the_tensor_is_named(tmp_path: Path) -> None:
    items = (PullItem(NAME, HELD, RankRef("u", 0), b""),)
    with pytest.raises(NotFound, match=r"model\.safetensors does not exist"):
        read_boxes(tmp_path, items, torch.bfloat16, _staging().fill)
    save_file({"v": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(NotFound, match="no tensor w"):
        read_boxes(tmp_path, items, torch.bfloat16, _staging().fill)
