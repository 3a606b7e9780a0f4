"""The laws of an in-place move's rounds, on programs compiled from the shapes of a small model."""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import RankRef, TransferProgram
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import TRAINING
from nereus_common.state.holdings import Holdings
from nereus_common.state.oracle import optimizer_tensors, unit_boxes
from nereus_common.state.program import compile_program
from nereus_common.transitions.rounds import HeldBytes, Round, in_place_rounds, state_peaks

pytestmark = pytest.mark.fast
MODEL = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 2,
        "vocab_size": 48,
        "tie_word_embeddings": False,
    }
)
LAYOUTS = [
    Layout.parse(text)
    for text in (
        "tp1.pp1.fs1",
        "tp2.pp1.fs1",
        "tp1.pp2.fs1",
        "tp3.pp1.fs1",
        "tp1.pp1.fs2",
        "tp1.pp4.fs1",
        "tp2.pp2.fs1",
    )
]
LARGEST = 48 * 12 * 4
"""Bytes of the embedding: no tensor is larger."""


def holdings(unit: str, layout: Layout) -> Holdings:
    parameters = unit_boxes(MODEL, layout, TRAINING)
    slots = unit_boxes(MODEL, layout, TRAINING, tensors=optimizer_tensors(MODEL))
    return {RankRef(unit, rank): {**parameters[rank], **slots[rank]} for rank in range(layout.ranks)}


@functools.cache
def move(old: Layout, new: Layout) -> tuple[TransferProgram, HeldBytes, dict[RankRef, DeviceId]]:
    sources, targets = holdings("old", old), holdings("new", new)
    held = {
        rank: {name: 4 * sum(box.elements for box in region) for name, region in tensors.items()}
        for rank, tensors in sources.items()
    }
    devices = {rank: DeviceId("node0", f"gpu{rank.rank}") for rank in (*sources, *targets)}
    return compile_program(targets, sources, wire_dtype="float32"), held, devices


def received(one: Round) -> dict[RankRef, int]:
    got: dict[RankRef, int] = defaultdict(int)
    for transfers in one.transfers.values():
        for transfer in transfers:
            got[transfer.target] += 4 * transfer.box.elements
    return got


pairs = st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
buckets = st.sampled_from([500, LARGEST, 4 * LARGEST])


@settings(max_examples=30)
@given(pairs, buckets)
def test_every_transfer_is_in_one_round_and_every_tensor_is_whole_there(
    pair: tuple[Layout, Layout], bucket: int
) -> None:
    program, held, devices = move(*pair)
    rounds = in_place_rounds(program, held, devices, bucket_bytes=bucket)
    moved = [(t.tensor, t.box, t.source, t.target) for one in rounds for unit in one.transfers.values() for t in unit]
    assert sorted(moved) == sorted((t.tensor, t.box, t.source, t.target) for t in program.transfers)
    where = [name for one in rounds for name in one.tensors]
    assert len(where) == len(set(where))
    assert all(t.tensor in one.tensors for one in rounds for unit in one.transfers.values() for t in unit)
    assert {name for one in rounds for name in one.tensors} == {name for rank in held.values() for name in rank}


@settings(max_examples=30)
@given(pairs, buckets)
def test_no_rank_receives_more_than_a_bucket_unless_one_tensor_is_larger(
    pair: tuple[Layout, Layout], bucket: int
) -> None:
    program, held, devices = move(*pair)
    for one in in_place_rounds(program, held, devices, bucket_bytes=bucket):
        tensors: dict[RankRef, set[str]] = defaultdict(set)
        for transfer in (transfer for transfers in one.transfers.values() for transfer in transfers):
            tensors[transfer.target].add(transfer.tensor)
        assert all(size <= bucket or len(tensors[rank]) == 1 for rank, size in received(one).items())
        for transfers in one.transfers.values():
            fill: dict[tuple[RankRef, int], int] = defaultdict(int)
            for transfer in transfers:
                fill[transfer.target, transfer.bucket] += 4 * transfer.box.elements
            assert max(fill.values()) <= max(bucket, LARGEST)


@settings(max_examples=30)
@given(pairs)
def test_a_device_never_holds_more_than_its_larger_state_and_two_buckets(pair: tuple[Layout, Layout]) -> None:
    program, held, devices = move(*pair)
    bucket = 2 * LARGEST
    rounds = in_place_rounds(program, held, devices, bucket_bytes=bucket)
    new: dict[DeviceId, int] = defaultdict(int)
    for transfer in program.transfers:
        new[devices[transfer.target]] += 4 * transfer.box.elements
    old = {devices[rank]: sum(tensors.values()) for rank, tensors in held.items()}
    for device, peak in state_peaks(rounds, program, held, devices).items():
        assert peak <= max(old.get(device, 0), new[device]) + bucket  # the second bucket is the staged one


def test_the_same_move_has_the_same_rounds() -> None:
    first, second = (in_place_rounds(*move(LAYOUTS[2], LAYOUTS[1]), bucket_bytes=1000) for _ in range(2))
    assert first == second and [one.number for one in first] == list(range(len(first)))
