"""The tokens of a dialogue stay what was sampled, turn after turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import IllegalTransition, InvalidInput
from nereus_common.rl.assembly import Completion, Group, assemble
from nereus_common.rl.episodes import NO_VERSION, Episode, EpisodeLimits, Turn

pytestmark = pytest.mark.fast

WIDE = EpisodeLimits(max_turns=8, turn_tokens=16, max_tokens=100)
OBSERVED = 1000
"""Ids from here on are the environment's, in these tests."""


def response(*ids: int, finished: bool = True, version: int = 3) -> Completion:
    return Completion(ids, tuple(-0.1 * token for token in ids), (version,) * len(ids), finished)


@st.composite
def episodes(draw: st.DrawFn) -> list[Episode]:
    """Every value of one episode, from its begin to its end."""
    limits = EpisodeLimits(draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 25)))
    values = [Episode(tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))), limits)]
    while not (now := values[-1]).ended:
        if now.turn is Turn.MODEL:
            ids = draw(st.lists(st.integers(1, 9), min_size=1, max_size=now.next_tokens))
            cut = len(ids) == now.next_tokens and draw(st.booleans())
            values.append(now.after_response(response(*ids, finished=not cut, version=now.turns)))
        else:
            ids = draw(st.lists(st.integers(OBSERVED, OBSERVED + 9), min_size=1, max_size=8))
            values.append(now.after_observation(ids, draw(st.sampled_from([0.0, 0.5, -1.0])), draw(st.booleans())))
    return values


@given(episodes())
def test_each_prompt_is_an_exact_prefix_of_the_next_and_of_the_whole(values: list[Episode]) -> None:
    prompts = [episode.next_prompt() for episode in values if episode.turn is Turn.MODEL]
    whole = values[-1].prompt + values[-1].token_ids
    for earlier, later in zip(prompts, [*prompts[1:], whole], strict=True):
        assert later[: len(earlier)] == earlier and len(later) > len(earlier)


@given(episodes())
def test_every_token_has_a_log_prob_a_version_and_a_mask_which_is_false_exactly_on_observations(
    values: list[Episode],
) -> None:
    done = values[-1].completion()
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == len(done.mask)
    for token, logprob, version, sampled in zip(done.token_ids, done.logprobs, done.versions, done.mask, strict=True):
        assert sampled == (token < OBSERVED)
        assert sampled or (logprob, version) == (0.0, NO_VERSION)
        assert not sampled or (version >= 0 and logprob == -0.1 * token)
    assert done.mask[0] and done.mask[-1], "an observation always stands between two responses"


@given(episodes())
def test_the_limits_hold_and_what_is_not_finished_was_cut(values: list[Episode]) -> None:
    done = values[-1]
    assert done.turns <= done.limits.max_turns and len(done.token_ids) <= done.limits.max_tokens
    assert done.finished == (done.turn is Turn.FINISHED) == done.completion().finished
    assert done.completion().oldest_version == 0


def test_sampled_ids_are_never_merged_though_their_text_could_be() -> None:
    # "he" + "llo" was sampled; encoding "hello" anew would give one other token
    episode = Episode((7,), WIDE).after_response(Completion((1, 2), (-0.7, -0.9), (0, 0), True))
    episode = episode.after_observation((4,), 0.0, False)
    assert episode.next_prompt() == (7, 1, 2, 4)
    done = episode.after_response(response(5)).after_observation((), 1.0, True).completion()
    assert (done.token_ids[:2], done.logprobs[:2]) == ((1, 2), (-0.7, -0.9))


def test_rewards_add_up() -> None:
    episode = Episode((7,), WIDE).after_response(response(1)).after_observation((OBSERVED,), 0.25, False)
    done = episode.after_response(response(2)).after_observation((), 0.5, True)
    assert done.completion().reward == 0.75


def test_a_response_that_was_cut_ends_the_episode_unfinished() -> None:
    episode = Episode((7,), WIDE).after_response(response(1, 2, finished=False))
    assert episode.ended and not episode.completion().finished


@pytest.mark.parametrize(("observed", "goes_on"), [(6, True), (7, False), (90, False)])
def test_an_observation_after_which_nothing_could_be_sampled_is_left_out(observed: int, goes_on: bool) -> None:
    limits = EpisodeLimits(max_turns=4, turn_tokens=4, max_tokens=10)
    episode = (
        Episode((7,), limits).after_response(response(1, 2, 3)).after_observation((OBSERVED,) * observed, 0.5, False)
    )
    assert episode.ended != goes_on
    if goes_on:
        assert episode.next_tokens == 1
    else:
        done = episode.completion()
        assert (done.token_ids, done.finished, done.reward) == ((1, 2, 3), False, 0.5)


def test_the_limit_on_turns_is_a_finish_and_its_observation_only_a_reward() -> None:
    limits = EpisodeLimits(max_turns=1, turn_tokens=4, max_tokens=10)
    done = Episode((7,), limits).after_response(response(1)).after_observation((OBSERVED,), 0.5, False).completion()
    assert (done.token_ids, done.finished, done.reward) == ((1,), True, 0.5)


def test_moves_out_of_turn_are_refused() -> None:
    fresh = Episode((7,), WIDE)
    waiting = fresh.after_response(response(1))
    for move in (
        lambda: fresh.after_observation((OBSERVED,), 0.0, False),
        fresh.completion,
        lambda: waiting.after_response(response(1)),
        waiting.next_prompt,
        lambda: waiting.after_observation((), 0.0, True).after_response(response(1)),
    ):
        with pytest.raises(IllegalTransition):
            move()


def test_a_response_longer_than_asked_for_and_an_empty_observation_are_refused() -> None:
    with pytest.raises(InvalidInput, match="17 tokens, 17 of them sampled, where 16 were asked for"):
        Episode((7,), WIDE).after_response(response(*range(1, 18)))
    with pytest.raises(InvalidInput, match="without tokens"):
        Episode((7,), WIDE).after_response(response(1)).after_observation((), 0.0, False)


def test_only_sampled_tokens_count_in_the_loss_of_a_batch() -> None:
    episode = Episode((7,), WIDE).after_response(response(1, 2)).after_observation((OBSERVED,) * 3, 0.0, False)
    done = episode.after_response(response(3)).after_observation((), 1.0, True).completion()
    batch = assemble([Group(0, (7,), (done,))])
    assert batch.mask.tolist() == [True, True, False, False, False, True]
    assert batch.loss_tokens == 3 and batch.rewards.tolist() == [1.0]
