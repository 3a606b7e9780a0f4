"""A checkpoint's index is whole or refused, whatever layouts wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_common.checkpoints.index import ModelIndex, Part, RankFile, StoredTensor, check_coverage, merge
from nereus_common.checkpoints.rank_file import write_rank_file
from nereus_common.checkpoints.state import BoxState, Digests, stored_names
from nereus_common.core.errors import VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import EMBEDDING, FINAL_NORM, ModelShape
from nereus_common.state.conventions import TRAINING
from nereus_common.state.oracle import owned_boxes, unit_boxes

pytestmark = pytest.mark.fast

SHAPE = ModelShape("llama", 3, 12, 18, 6, 6, 2, 13, tied=True)
"""Sizes that no degree but 2 and 3 divides, a vocabulary that none does."""
LAYOUTS = ["tp1.pp1.fs1", "tp3.pp1.fs1", "tp2.pp2(1+2).fs1", "tp1.pp3.fs2", "tp2.pp1.fs3", "tp6.pp1.fs1", "tp1.pp1.fs5"]


def whole_state() -> dict[TensorName, BoxState]:
    rng = np.random.default_rng(1)
    found = {}
    for name, tensor in SHAPE.tensors().items():
        arrays = (rng.normal(size=tensor.shape).astype(np.float32) for _ in range(3))
        found[name] = BoxState(name, tensor.shape, Box.whole(tensor.shape), *arrays, updates=4)
    return found


def cut(state: BoxState, box: Box) -> BoxState:
    arrays = (np.ascontiguousarray(one[box.slices]) for one in (state.parameter, state.exp_avg, state.exp_avg_sq))
    return BoxState(state.name, state.shape, box, *arrays, updates=state.updates)


def files_of(layout: str, folder: Path) -> list[RankFile]:
    """What the ranks of a unit would write of `whole_state`."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = whole_state()
    owned = owned_boxes(unit_boxes(SHAPE, Layout.parse(layout), TRAINING))
    return [
        write_rank_file(folder, rank, [cut(whole[name], box) for name, boxes in mine.items() for box in boxes])
        for rank, mine in enumerate(owned)
    ]


@pytest.fixture
def index(tmp_path: Path) -> ModelIndex:
    return merge(files_of("tp2.pp1.fs3", tmp_path))


@settings(max_examples=10, deadline=None)
@given(layout=st.sampled_from(LAYOUTS))
def test_every_layout_covers_the_model_once_and_has_the_same_digests(
    layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = files_of(layout, tmp_path_factory.mktemp("rank"))
    check_coverage(merge(files), SHAPE)
    assert Digests.sum(file.digests for file in files) == Digests.of(whole_state().values())


def test_what_a_rank_reports_survives_the_wire(tmp_path: Path) -> None:
    for file in files_of("tp1.pp2.fs2", tmp_path):
        assert RankFile.from_json(file.to_json(), "here") == file


def test_a_changed_bit_anywhere_changes_its_digest_alone() -> None:
    whole = whole_state()
    before = Digests.of(whole.values())
    whole[FINAL_NORM].exp_avg_sq.view(np.uint32)[3] ^= 1
    assert before.differing(Digests.of(whole.values())) == ("exp_avg_sq",)


def without(index: ModelIndex, name: TensorName) -> ModelIndex:
    return replace(index, tensors={key: one for key, one in index.tensors.items() if key != name})


def with_parts(index: ModelIndex, change: Callable[[tuple[Part, ...]], tuple[Part, ...]]) -> ModelIndex:
    stored = index.tensors[EMBEDDING]
    changed = StoredTensor(stored.shape, stored.dtype, change(stored.parts))
    return replace(index, tensors={**index.tensors, EMBEDDING: changed})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda index: without(index, stored_names(FINAL_NORM)[1]), r"model.norm.weight:exp_avg: tensors lacks it"),
        (lambda index: with_parts(index, lambda parts: parts[1:]), r"no part holds \[0:"),
        (lambda index: with_parts(index, lambda parts: (*parts, parts[0])), "hold the same elements"),
        (
            lambda index: with_parts(index, lambda parts: (*parts, Part("x", Box((0, 0), (14, 12))))),
            r"not inside shape \(13, 12\)",
        ),
        (
            lambda index: replace(index, updates={**index.updates, TensorName("lm_head.weight"): 4}),
            "lm_head.weight: updates holds it, and the model has no such tensor",
        ),
        (lambda index: replace(index, updates={}), "updates lacks it"),
    ],
)
def test_a_gap_an_overlap_or_a_stranger_is_named(
    fault: Callable[[ModelIndex], ModelIndex], said: str, index: ModelIndex
) -> None:
    with pytest.raises(VerificationFailed, match=said):
        check_coverage(fault(index), SHAPE)


def test_ranks_that_disagree_about_a_counter_are_refused(tmp_path: Path) -> None:
    first, second, *_ = files_of("tp1.pp1.fs2", tmp_path)
    late = replace(second, index=replace(second.index, updates={name: 5 for name in second.index.updates}))
    with pytest.raises(VerificationFailed, match=r"updates is 5 in rank-0001.safetensors, and 4 elsewhere"):
        merge([first, late])
