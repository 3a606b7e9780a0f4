"""Packs hold every wanted token once, in exactly the context in which it was sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.packing import Pack, pack_batch, pack_for_ranks
from nereus_common.rl.rollouts import RolloutBatch, offsets

pytestmark = pytest.mark.fast


def build(prompts: list[int], lengths: list[list[int]], seed: int = 0) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    flat = [length for group in lengths for length in group]
    tokens = sum(flat)
    return RolloutBatch(
        prompt_tokens=rng.integers(0, 1000, sum(prompts), dtype=np.int32),
        prompt_offsets=offsets(prompts),
        position=np.arange(len(prompts), dtype=np.int64),
        group=np.repeat(np.arange(len(prompts), dtype=np.int32), [len(group) for group in lengths]),
        response_tokens=rng.integers(0, 1000, tokens, dtype=np.int32),
        response_offsets=offsets(flat),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        mask=rng.random(tokens) < 0.8,
        finished=np.ones(len(flat), np.bool_),
        rewards=np.zeros(len(flat), np.float32),
        advantages=np.zeros(tokens, np.float32),
    )


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    groups = draw(st.integers(0, 5))
    prompts = draw(st.lists(st.integers(1, 40), min_size=groups, max_size=groups))
    responses = st.lists(st.integers(0, 30), min_size=1, max_size=5)
    lengths = draw(st.lists(responses, min_size=groups, max_size=groups))
    return build(prompts, lengths, draw(st.integers(0, 9)))


def contexts(pack: Pack) -> dict[int, tuple[list[int], int]]:
    """source → (the tokens its prediction sees, in order of position; the token to predict)."""
    found: dict[int, tuple[list[int], int]] = {}
    for segment in pack.segments:
        visible = pack.visible(segment)
        for row, target, source in zip(pack.logit_rows, pack.targets, pack.source, strict=True):
            if source >= 0 and segment.start <= row < segment.stop:
                seen = np.flatnonzero(visible[row - segment.start]) + segment.start
                positions = pack.position_ids[seen]
                assert sorted(positions) == list(range(len(seen)))
                assert int(source) not in found
                found[int(source)] = (pack.input_ids[seen][np.argsort(positions)].tolist(), int(target))
    return found


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 120), st.booleans(), st.booleans())
def test_every_wanted_token_is_predicted_once_from_what_was_sampled_before_it(
    batch: RolloutBatch, budget: int, shared: bool, masked: bool
) -> None:
    wanted = batch.mask if masked else None
    found: dict[int, tuple[list[int], int]] = {}
    for pack in pack_batch(batch, budget, shared_prefix=shared, wanted=wanted):
        held = contexts(pack)
        assert not held.keys() & found.keys()
        found |= held
    expected = {}
    for sequence in range(batch.sequences):
        prompt, response = batch.prompt(batch.group[sequence]).tolist(), batch.response(sequence).tolist()
        for index, source in enumerate(range(batch.span(sequence).start, batch.span(sequence).stop)):
            if wanted is None or wanted[source]:
                expected[source] = (prompt + response[:index], response[index])
    assert found == expected


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 120), st.booleans(), st.integers(1, 3))
def test_the_end_of_every_sequence_sees_all_of_it_whatever_is_masked_or_cut_short(
    batch: RolloutBatch, budget: int, shared: bool, degree: int
) -> None:
    cut = batch.with_columns(finished=np.zeros(batch.sequences), mask=np.zeros(len(batch.mask)))
    found: dict[int, tuple[list[int], int]] = {}
    for share in pack_for_ranks(cut, degree, budget, shared_prefix=shared, ends=True):
        for pack in share:
            held = contexts(pack)
            assert not held.keys() & found.keys()
            found |= held
    sequences = range(batch.sequences)
    whole = {one: [*batch.prompt(batch.group[one]).tolist(), *batch.response(one).tolist()] for one in sequences}
    assert {one: seen for one, (seen, _) in found.items()} == whole


def test_ends_share_a_prompt_as_predictions_do() -> None:
    batch = build([20], [[5] * 8])
    (shared,) = pack_batch(batch, 1024, ends=True)
    assert shared.used == 20 + 8 * 5
    assert shared.logit_rows[shared.source >= 0].tolist() == [20 + 5 * one + 4 for one in range(8)]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(8, 120), st.integers(1, 3))
def test_all_ranks_get_equally_many_packs_and_together_every_token(
    batch: RolloutBatch, degree: int, budget: int, at_least: int
) -> None:
    shares = pack_for_ranks(batch, degree, budget, at_least=at_least)
    assert len(shares) == degree
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) >= at_least
    sources = np.concatenate([pack.source[pack.source >= 0] for share in shares for pack in share])
    assert sorted(sources) == list(range(len(batch.response_tokens)))


@given(batches(), st.integers(8, 120))
@settings(max_examples=60, deadline=None)
def test_a_pack_fits_the_budget_unless_one_sequence_alone_exceeds_it(batch: RolloutBatch, budget: int) -> None:
    for pack in pack_batch(batch, budget):
        if len(pack.input_ids) > budget:
            assert len(pack.segments) == 1 and pack.branch.max() <= 1
            assert len(pack.input_ids) % budget == 0
        assert len(pack.targets) % 64 == 0


def test_a_group_larger_than_the_budget_repeats_its_prompt() -> None:
    batch = build([10], [[9, 9, 9, 9]])
    packs = pack_batch(batch, 30)
    assert [pack.used for pack in packs] == [26, 26]
    assert all((pack.input_ids[:10] == batch.prompt(0)).all() for pack in packs)


def test_one_prompt_is_computed_once_for_all_responses() -> None:
    batch = build([20], [[5] * 8])
    (shared,) = pack_batch(batch, 1024)
    (alone,) = pack_batch(batch, 1024, shared_prefix=False)
    assert shared.used == 20 + 8 * 4
    assert alone.used == 8 * 24


def test_a_sampled_end_token_that_equals_the_padding_is_predicted() -> None:
    batch = build([2], [[3, 3]]).with_columns(response_tokens=np.array([5, 6, 0, 5, 0, 0]), mask=np.ones(6))
    (pack,) = pack_batch(batch, 64)
    assert pack.targets[pack.source >= 0].tolist() == [5, 6, 0, 5, 0, 0]


def test_an_empty_batch_gives_empty_packs_to_every_rank() -> None:
    shares = pack_for_ranks(build([], []), 2, 64, at_least=2)
    assert [[pack.used for pack in share] for share in shares] == [[0, 0], [0, 0]]


def test_a_prompt_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="prompt is empty"):
        pack_batch(build([0], [[2]]), 64)
