"""Gathering completions into batches, and cutting batches over units."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.assembly import Completion, Group, assemble, share_groups
from nereus_common.rl.rollouts import RolloutBatch

pytestmark = pytest.mark.fast

tokens = st.integers(0, 1000)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = tuple(draw(st.lists(tokens, min_size=1, max_size=6)))
    return Completion(ids, tuple(-0.5 * i for i in range(len(ids))), (3,) * len(ids), draw(st.booleans()))


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    count = draw(st.integers(0, 6))
    return [
        Group(
            100 + index,
            tuple(draw(st.lists(tokens, min_size=1, max_size=5))),
            tuple(draw(st.lists(completions(), min_size=1, max_size=4))),
        )
        for index in range(count)
    ]


def _read_back(batch: RolloutBatch) -> list[Group]:
    return [
        Group(
            int(batch.position[group]),
            tuple(batch.prompt(group).tolist()),
            tuple(
                Completion(
                    tuple(batch.response(sequence).tolist()),
                    tuple(batch.logprobs[batch.span(sequence)].tolist()),
                    tuple(batch.versions[batch.span(sequence)].tolist()),
                    bool(batch.finished[sequence]),
                )
                for sequence in np.flatnonzero(batch.group == group)
            ),
        )
        for group in range(batch.groups)
    ]


@given(groups())
def test_the_tokens_that_were_sampled_are_the_tokens_in_the_batch(sampled: list[Group]) -> None:
    assert _read_back(assemble(sampled)) == sampled


@given(groups())
def test_a_batch_survives_its_columns(sampled: list[Group]) -> None:
    batch = assemble(sampled)
    again = RolloutBatch.from_columns(batch.columns())
    assert _read_back(again) == sampled


@given(groups(), st.integers(1, 5))
def test_every_group_is_in_exactly_one_share_and_stays_whole(sampled: list[Group], shares: int) -> None:
    batch = assemble(sampled)
    cut = share_groups(batch, shares)
    assert len(cut) == shares
    assert sorted(group for share in cut for group in share) == list(range(batch.groups))
    together = [group for share in cut for group in _read_back(batch.select_groups(share))]
    assert sorted(together, key=lambda group: group.position) == sampled


def test_shares_are_balanced_by_tokens_not_by_groups() -> None:
    def group(position: int, length: int) -> Group:
        return Group(position, (1,), (Completion((2,) * length, (0.0,) * length, (0,) * length, True),))

    batch = assemble([group(0, 40), group(1, 10), group(2, 10), group(3, 10), group(4, 10)])
    assert share_groups(batch, 2) == ((0,), (1, 2, 3, 4))


def test_every_minibatch_is_balanced_by_itself_and_all_of_them_together() -> None:
    def group(position: int, length: int) -> Group:
        return Group(position, (1,), (Completion((2,) * length, (0.0,) * length, (0,) * length, True),))

    batch = assemble([group(index, length) for index, length in enumerate([30, 10, 10, 10, 9, 8])])
    cut = batch.with_columns(minibatch=np.array([0, 0, 1, 1, 2, 2]))
    assert share_groups(cut, 2) == ((0, 3, 5), (1, 2, 4))


def test_a_completion_has_one_log_prob_and_one_version_per_token() -> None:
    with pytest.raises(InvalidInput, match="2 tokens, 1 log-probs"):
        Completion((1, 2), (0.0,), (0, 0), True)


def test_a_missing_column_is_named() -> None:
    columns = assemble([]).columns()
    del columns["versions"]
    with pytest.raises(InvalidInput, match="versions is missing"):
        RolloutBatch.from_columns(columns)


def test_a_batch_may_do_without_reference_log_probs() -> None:
    columns = assemble([]).columns()
    del columns["reference"]
    assert len(RolloutBatch.from_columns(columns).reference) == 0
