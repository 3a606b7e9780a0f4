from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import DeviceId, Head, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.transfer import Box, RankRef
from nereus_common.state.architecture import EMBEDDING, ModelShape
from nereus_common.state.boxes import difference, elements, intersection
from nereus_common.state.conventions import GENERATION, TRAINING, Convention
from nereus_common.state.distance import device_distance
from nereus_common.state.holdings import Holdings
from nereus_common.state.oracle import RankBoxes, optimizer_tensors, unit_boxes
from nereus_common.state.program import bytes_needed, compile_program
from tests.unit.state.strategies import conventions, hold, indexed, layouts, models, run

pytestmark = pytest.mark.fast

W = TensorName("w")
A, B, C, T = (RankRef(unit, 0) for unit in "abct")


def unit(name: str, model: ModelShape, layout: Layout, convention: Convention) -> dict[RankRef, RankBoxes]:
    return {RankRef(name, rank): boxes for rank, boxes in enumerate(unit_boxes(model, layout, convention))}


@settings(max_examples=25)
@given(st.data(), models(), st.integers(1, 3), st.sampled_from([4, 64, 1 << 28]))
def test_a_reshard_delivers_exactly_what_is_lacking_each_element_once(
    data: st.DataObject, model: ModelShape, replicas: int, bucket: int
) -> None:
    one, other = data.draw(conventions(model)), data.draw(conventions(model))
    sources: dict[RankRef, RankBoxes] = {}
    for replica in range(replicas):
        sources |= unit(f"s{replica}", model, data.draw(layouts(model, one)), one)
    targets = unit("t", model, data.draw(layouts(model, other)), other)
    held = {rank: {name: data.draw(parts(region)) for name, region in boxes.items()} for rank, boxes in targets.items()}
    program = compile_program(targets, sources, held=held, wire_dtype="float32", bucket_bytes=bucket)

    state = indexed(model.tensors())
    origin = {rank: hold(state, boxes) for rank, boxes in sources.items()}
    for target, boxes in targets.items():
        into = {name: np.zeros_like(array) for name, array in state.items()}
        count = {name: np.zeros_like(array) for name, array in state.items()}
        run(program, origin, target, into, count)
        for name, array in state.items():
            lacking = difference(boxes.get(name, ()), held[target].get(name, ()))
            mask = np.zeros_like(array)
            for box in lacking:
                mask[box.slices] = 1
            assert (count[name] == mask).all()
            assert (into[name] == array * mask).all()
    assert program.bytes == bytes_needed(targets, held=held, wire_dtype="float32")
    check_buckets(program.transfers, bucket // 4)


@st.composite
def parts(draw: st.DrawFn, region: tuple[Box, ...]) -> tuple[Box, ...]:
    """Some part of a region, perhaps none or all: the first rows of its boxes."""
    kept = []
    for box in region:
        rows = draw(st.integers(0, box.shape[0]))
        kept.append(Box(box.start, (box.start[0] + rows, *box.stop[1:])))
    return tuple(kept)


def check_buckets(transfers: tuple, limit: int) -> None:
    fill: dict[tuple[RankRef, int], int] = defaultdict(int)
    last: dict[RankRef, int] = {}
    for transfer in transfers:
        fill[transfer.target, transfer.bucket] += transfer.box.elements
        assert transfer.bucket - last.get(transfer.target, 0) in (0, 1), "buckets are numbered in order, without gaps"
        last[transfer.target] = transfer.bucket
    assert all(0 < used <= limit for used in fill.values())


@settings(max_examples=25)
@given(st.data(), models())
def test_optimizer_state_reshards_like_parameters_and_counters_reach_every_rank(
    data: st.DataObject, model: ModelShape
) -> None:
    tensors = optimizer_tensors(model)

    def ranks(name: str) -> dict[RankRef, RankBoxes]:
        layout = data.draw(layouts(model, TRAINING))
        return {
            RankRef(name, rank): boxes
            for rank, boxes in enumerate(unit_boxes(model, layout, TRAINING, tensors=tensors))
        }

    sources, targets = ranks("s"), ranks("t")
    program = compile_program(targets, sources, wire_dtype="float32")
    state = indexed(tensors)
    origin = {rank: hold(state, boxes) for rank, boxes in sources.items()}
    for target, boxes in targets.items():
        into = {name: np.zeros_like(array) for name, array in state.items()}
        run(program, origin, target, into, {name: np.zeros_like(array) for name, array in state.items()})
        for name, region in boxes.items():
            assert all((into[name][box.slices] == state[name][box.slices]).all() for box in region)


@given(st.data(), models())
def test_a_rank_that_already_holds_everything_receives_nothing(data: st.DataObject, model: ModelShape) -> None:
    convention = data.draw(conventions(model))
    ranks = unit("u", model, data.draw(layouts(model, convention)), convention)
    assert compile_program(ranks, ranks, wire_dtype="bfloat16").transfers == ()
    assert compile_program(ranks, {}, held=ranks, wire_dtype="bfloat16").transfers == ()


@settings(max_examples=25)
@given(st.data(), models(Head.LM), st.randoms(use_true_random=False))
def test_the_program_does_not_depend_on_the_order_of_listing(
    data: st.DataObject, model: ModelShape, source_of_disorder: random.Random
) -> None:
    sources = unit("s", model, data.draw(layouts(model, TRAINING)), TRAINING)
    targets = unit("t", model, data.draw(layouts(model, GENERATION)), GENERATION)

    def shuffled(holdings: Holdings) -> Holdings:
        def mix(mapping: Mapping) -> dict:
            keys = list(mapping)
            source_of_disorder.shuffle(keys)
            return {key: mapping[key] for key in keys}

        return {rank: mix(boxes) for rank, boxes in mix(holdings).items()}

    expected = compile_program(targets, sources, wire_dtype="bfloat16")
    assert compile_program(shuffled(targets), shuffled(sources), wire_dtype="bfloat16") == expected


@given(st.data(), models(Head.LM))
def test_two_equal_replicas_share_the_sending(data: st.DataObject, model: ModelShape) -> None:
    sources = unit("s0", model, Layout(), TRAINING) | unit("s1", model, Layout(), TRAINING)
    targets = unit("t", model, data.draw(layouts(model, GENERATION)), GENERATION)
    program = compile_program(targets, sources, wire_dtype="bfloat16")
    sent: Counter[RankRef] = Counter()
    for transfer in program.transfers:
        sent[transfer.source] += transfer.box.elements
    largest = max(box.elements for boxes in targets.values() for region in boxes.values() for box in region)
    assert abs(sent[RankRef("s0", 0)] - sent[RankRef("s1", 0)]) <= largest


def test_one_large_tensor_is_split_between_equal_holders() -> None:
    box = Box.whole((8192, 4096))
    sources = {rank: {W: (box,)} for rank in (A, B, C)}
    program = compile_program({T: {W: (box,)}}, sources, wire_dtype="bfloat16")
    sent: Counter[RankRef] = Counter()
    for transfer in program.transfers:
        sent[transfer.source] += transfer.box.elements
    assert sum(sent.values()) == box.elements
    assert max(sent.values()) / min(sent.values()) <= 2


def test_the_nearest_holder_sends() -> None:
    box = Box.whole((6, 4))
    near = DeviceId("node1", "cpu1")
    devices = {A: DeviceId("node0", "cpu0"), B: DeviceId("node1", "cpu0"), C: near, T: near}
    for sources, chosen in (((A, B, C), C), ((A, B), B), ((A,), A)):
        program = compile_program(
            {T: {W: (box,)}},
            {rank: {W: (box,)} for rank in sources},
            wire_dtype="bfloat16",
            distance=device_distance(devices),
        )
        assert [transfer.source for transfer in program.transfers] == [chosen]


def test_a_far_holder_sends_only_what_no_near_one_has() -> None:
    devices = {A: DeviceId("far", "x"), B: DeviceId("here", "x"), T: DeviceId("here", "y")}
    program = compile_program(
        {T: {W: (Box.whole((6, 4)),)}},
        {A: {W: (Box.whole((6, 4)),)}, B: {W: (Box((2, 0), (4, 4)),)}},
        wire_dtype="bfloat16",
        distance=device_distance(devices),
    )
    assert [(transfer.source, transfer.box.start[0], transfer.box.stop[0]) for transfer in program.transfers] == [
        (A, 0, 2),
        (B, 2, 4),
        (A, 4, 6),
    ]


def test_a_serving_rank_takes_each_query_row_from_the_rank_that_trains_it() -> None:
    """Twelve query heads of four rows, tp2 → tp4 with two shared KV heads."""
    model = ModelShape("llama", 1, 8, 16, 12, 2, 4, 64, tied=True)
    program = compile_program(
        unit("serve", model, Layout(tp=4), GENERATION),
        unit("train", model, Layout(tp=2), TRAINING),
        wire_dtype="bfloat16",
    )
    for name, rows in (("q_proj", 12), ("k_proj", 4), ("v_proj", 4)):
        tensor = f"model.layers.0.self_attn.{name}.weight"
        found = [
            (t.target.rank, t.source.rank, t.box.start[0], t.box.stop[0])
            for t in program.transfers
            if t.tensor == tensor
        ]
        first = [12 * rank if name == "q_proj" else 4 * (rank // 2) for rank in range(4)]
        assert found == [(rank, rank // 2, first[rank], first[rank] + rows) for rank in range(4)]


def test_a_tied_embedding_crosses_once_per_rank_and_reaches_both_ends() -> None:
    model = ModelShape("llama", 2, 8, 16, 4, 2, 2, 64, tied=True)
    program = compile_program(
        unit("t", model, Layout(pp=2), GENERATION), unit("s", model, Layout(), TRAINING), wire_dtype="bfloat16"
    )
    assert [t.target.rank for t in program.transfers if t.tensor == EMBEDDING] == [0, 1]
    assert program.bytes == 2 * (model.parameters + 64 * 8)


def test_needed_bytes_count_shared_heads_per_rank_and_no_padding() -> None:
    model = ModelShape("llama", 1, 8, 16, 4, 1, 2, 70, tied=False)
    one = bytes_needed(unit("t", model, Layout(), GENERATION), wire_dtype="bfloat16")
    two = bytes_needed(unit("t", model, Layout(tp=2), GENERATION), wire_dtype="bfloat16")
    assert one == 2 * model.parameters
    assert two - one == 2 * (2 * 2 * 8 + 3 * 8)  # k and v are held twice, and so are the three norms


def test_layers_come_in_number_order() -> None:
    model = ModelShape("llama", 12, 4, 4, 2, 1, 2, 8, tied=True)
    program = compile_program(
        unit("t", model, Layout(), GENERATION), unit("s", model, Layout(), TRAINING), wire_dtype="bfloat16"
    )
    order = [int(t.tensor.split(".")[2]) for t in program.transfers if ".layers." in t.tensor]
    assert order == sorted(order)


def test_a_target_whose_boxes_overlap_receives_each_element_once() -> None:
    boxes = (Box((0,), (6,)), Box((4,), (8,)))
    program = compile_program({T: {W: boxes}}, {A: {W: (Box.whole((8,)),)}}, wire_dtype="bfloat16")
    assert elements(t.box for t in program.transfers) == 8
    assert not any(intersection((a.box,), (b.box,)) for a in program.transfers for b in program.transfers if a != b)


def test_a_box_that_nobody_holds_is_named() -> None:
    with pytest.raises(NotFound, match=r"w\[4:8\].*t#0") as caught:
        compile_program({T: {W: (Box.whole((8,)),)}}, {A: {W: (Box((0,), (4,)),)}}, wire_dtype="bfloat16")
    assert caught.value.details["tensor"] == "w"
    with pytest.raises(NotFound, match=r"w\[0:8\]"):
        compile_program({T: {W: (Box.whole((8,)),)}}, {}, wire_dtype="bfloat16")


def test_unknown_dtypes_and_buckets_too_small_are_refused() -> None:
    with pytest.raises(InvalidInput, match="float7"):
        bytes_needed({}, wire_dtype="float7")
    with pytest.raises(InvalidInput, match="bucket_bytes is 1"):
        compile_program({}, {}, wire_dtype="bfloat16", bucket_bytes=1)


def test_a_program_for_a_thousand_ranks_moves_what_they_lack_and_every_source_sends() -> None:
    """Llama-3-8B in shape, one unit of 512 ranks to one of 1,024."""
    model = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
    sources = unit("s", model, Layout(tp=8, pp=4, fs=16), TRAINING)
    targets = unit("t", model, Layout(tp=8, pp=8, fs=16), TRAINING)
    program = compile_program(targets, sources, wire_dtype="float32")
    assert program.bytes == bytes_needed(targets, wire_dtype="float32")
    last = RankRef("t", 1023)
    received = [transfer.box.elements for transfer in program.for_target(last)]
    assert sum(received) == sum(elements(region) for region in targets[last].values())
    assert {source for source, _ in program.bytes_by_link()} == set(sources)
