from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidInput, NereusError
from nereus_common.engines.generation.base import Delta, Finish, GenerationRequest, Sampling
from nereus_common.engines.generation.continuation import Continuation

pytestmark = pytest.mark.fast
STOP = 99


def _sample(max_tokens: int = 6) -> Continuation:
    sampling = Sampling(max_tokens, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(STOP,))
    return Continuation(GenerationRequest("r", (1, 2), sampling, samples=3, across_versions=True), 2)


def _delta(tokens: tuple[int, ...], finish: Finish | None = None) -> Delta:
    return Delta(0, tokens, tuple(-0.5 for _ in tokens), finish)


@given(st.lists(st.integers(0, 3), max_size=8))
def test_every_leg_starts_from_all_tokens_so_far_and_asks_for_the_rest(lengths: list[int]) -> None:
    sample, count = _sample(30), 0
    for length in lengths:
        tokens = tuple(range(10 + count, 10 + count + length))
        leg = sample.leg()
        assert leg.prompt_token_ids == (1, 2, *range(10, 10 + count))
        assert len(leg.prompt_token_ids) + leg.sampling.max_tokens == 32
        sample.take(_delta(tokens, Finish.ABORT), cut=None)
        count += length
    assert sample.finish is None


def test_legs_differ_in_their_ids_and_keep_the_sampling() -> None:
    sample = _sample()
    first = sample.leg()
    sample.take(_delta((7,), Finish.ABORT), cut=None)
    second = sample.leg()
    assert first.id != second.id
    assert (second.samples, second.across_versions) == (1, False)
    assert second.sampling == Sampling(5, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(STOP,))


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [((3, STOP), Finish.STOP), ((3, 4, 5, 6, 7, 8), Finish.LENGTH), ((3, 4, 5, 6, 7, STOP), Finish.STOP), ((), None)],
)
def test_an_interrupt_at_the_very_end_is_the_end(tokens: tuple[int, ...], finish: Finish | None) -> None:
    sample = _sample()
    assert sample.take(_delta(tokens, Finish.ABORT), cut=None) == Delta(2, tokens, (-0.5,) * len(tokens), finish)
    if finish is not None:
        with pytest.raises(NereusError, match="has ended"):
            sample.leg()


def test_an_abort_that_is_no_interrupt_stays_an_abort() -> None:
    sample = _sample()
    assert sample.take(_delta((3,), Finish.ABORT), cut=Finish.ABORT).finish is Finish.ABORT
    assert sample.finish is Finish.ABORT


@pytest.mark.parametrize("cut", [Finish.ABORT, Finish.INTERRUPTED, Finish.REQUEUED])
def test_a_sample_that_is_cut_at_its_own_end_has_ended_by_itself(cut: Finish) -> None:
    assert _sample().take(_delta((3,), Finish.ABORT), cut=cut).finish is cut
    assert _sample().take(_delta((3, STOP), Finish.ABORT), cut=cut).finish is Finish.STOP
    assert _sample(1).take(_delta((3,), Finish.ABORT), cut=cut).finish is Finish.LENGTH


def test_a_response_begun_elsewhere_goes_on_from_its_tokens_within_the_same_limit() -> None:
    request = GenerationRequest("r", (1, 2), Sampling(6, stop_token_ids=(STOP,)), response_token_ids=(7, 8))
    leg = Continuation(request, 0).leg()
    assert (leg.prompt_token_ids, leg.sampling.max_tokens, leg.response_token_ids) == ((1, 2, 7, 8), 4, ())


@pytest.mark.parametrize(("tokens", "finish"), [((7, STOP), Finish.STOP), ((1, 2, 3, 4, 5, 6), Finish.LENGTH)])
def test_a_response_that_was_whole_already_has_nothing_left_to_sample(tokens: tuple[int, ...], finish: Finish) -> None:
    request = GenerationRequest("r", (1, 2), Sampling(6, stop_token_ids=(STOP,)), response_token_ids=tokens)
    assert Continuation(request, 0).finish is finish


def test_only_a_request_of_one_sample_goes_on_from_a_response() -> None:
    with pytest.raises(InvalidInput, match="one request for each response"):
        GenerationRequest("r", (1, 2), Sampling(6), samples=2, response_token_ids=(7,))
