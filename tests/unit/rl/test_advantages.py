"""Advantages by estimator: what a response is compared with, and which token answers for what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.spec.algorithms import GrpoSpec, PpoSpec, ReinforceSpec, RemaxSpec, RlooSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.rl.advantages import ESTIMATORS, estimate
from nereus_common.rl.losses import make_loss
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.value_loss import ValueLoss
from tests.unit.rl.batches import make_batch

pytestmark = pytest.mark.fast

GAE: dict[str, Any] = {"name": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}
PENALTY: dict[str, Any] = {"kl_beta": 0.5, "kl_estimator": "k1"}


def advantages(batch: RolloutBatch, **options: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return estimate(batch, options).advantages


def test_group_advantages_are_centred_scaled_and_the_same_on_every_token() -> None:
    batch = make_batch([[0, 1], [2, 2, 5]], [1, 2, 1, 1, 3])
    expected = [-1, 1, 1, *[-1 / np.sqrt(2)] * 2, *[np.sqrt(2)] * 3]
    np.testing.assert_allclose(advantages(batch, name="group", epsilon=0), expected, rtol=1e-6)


def test_without_scaling_only_the_mean_is_taken_off() -> None:
    batch = make_batch([[0, 1], [2, 2, 5]], [1] * 5)
    found = advantages(batch, name="group", scale_by_std=False)
    np.testing.assert_allclose(found, [-0.5, 0.5, -1, -1, 2], rtol=1e-6)


@pytest.mark.parametrize("name", ["group", "leave-one-out"])
@pytest.mark.parametrize("groups", [[[3.0]], [[0.1, 0.1, 0.1]]])
def test_a_group_without_contrast_has_no_advantage(name: str, groups: list[list[float]]) -> None:
    assert (advantages(make_batch(groups, [2] * len(groups[0])), name=name) == 0).all()


def test_leave_one_out_compares_with_the_others_only() -> None:
    batch = make_batch([[1, 2, 6], [5, 1]], [1] * 5)
    np.testing.assert_allclose(advantages(batch, name="leave-one-out"), [-3, -1.5, 4.5, 4, -4], rtol=1e-6)


def test_a_greedy_baseline_is_that_of_the_own_prompt() -> None:
    batch = make_batch([[1, 2], [5]], [1, 2, 1], baseline=[0.5, 7])
    np.testing.assert_allclose(advantages(batch, name="greedy"), [0.5, 1.5, 1.5, -2], rtol=1e-6)


def penalised(groups: list[list[float]], **columns: Any) -> RolloutBatch:
    """Two responses of two tokens; the k1 of each is 1, 2, 3 and 4."""
    return make_batch(groups, [2, 2], logprobs=[-1, -1, -1, -1], reference=[-2, -3, -4, -5], **columns)


def test_a_penalty_counts_whole_where_outcomes_are_compared() -> None:
    batch = penalised([[3, 3]])
    assert advantages(batch, name="group", scale_by_std=False, **PENALTY).tolist() == [1, 1, -1, -1]
    assert advantages(batch, name="leave-one-out", **PENALTY).tolist() == [2, 2, -2, -2]


def test_a_penalty_counts_from_a_token_on_where_rewards_are_per_token() -> None:
    batch = penalised([[3], [3]], baseline=[1, 1])
    assert advantages(batch, name="greedy", **PENALTY).tolist() == [0.5, 1, -1.5, 0]
    to_go = np.array([1.5, 2, -0.5, 1])
    found = advantages(batch, name="to-go", **PENALTY)
    np.testing.assert_allclose(found, (to_go - to_go.mean()) / to_go.std(ddof=1), rtol=1e-6)


def test_rewards_to_go_are_discounted_and_taken_relative_to_the_group_if_asked() -> None:
    batch = make_batch([[1, 3], [4, 0]], [1, 2, 2, 1])
    plain = np.array([1, 1.5, 3, 2, 4, 0])
    found = advantages(batch, name="to-go", gamma=0.5)
    np.testing.assert_allclose(found, (plain - plain.mean()) / plain.std(ddof=1), rtol=1e-6)
    relative = np.array([-1, 0.5, 1, 1, 2, -2])
    found = advantages(batch, name="to-go", gamma=0.5, group_mean=True)
    np.testing.assert_allclose(found, (relative - relative.mean()) / relative.std(ddof=1), rtol=1e-6)


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, as a double sum."""
    ends = [*values[1:], 0.0]
    errors = [r + gamma * after - v for r, after, v in zip(rewards, ends, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(errors))) for t in range(len(errors))
    ]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.booleans())
def test_gae_is_its_definition_over_the_unmasked_tokens(lengths: list[int], seed: int, masked: bool) -> None:
    random = np.random.default_rng(seed)
    size = sum(lengths)
    mask = random.random(size) < (0.6 if masked else 2)
    columns = {name: random.normal(size=size).astype(np.float32) for name in ("values", "logprobs", "reference")}
    columns = {name: np.where(mask, column, np.nan) for name, column in columns.items()}
    rewards = random.normal(size=len(lengths)).astype(np.float32)
    batch = estimate(make_batch([[reward] for reward in rewards], lengths, mask=mask, **columns), {**GAE, **PENALTY})
    assert (batch.advantages[~mask] == 0).all() and (batch.returns[~mask] == 0).all()
    for one in range(batch.sequences):
        own = np.arange(*batch.span(one).indices(size))[mask[batch.span(one)]]
        if len(own):
            tokens = (-0.5 * (batch.logprobs - batch.reference)[own]).tolist()
            tokens[-1] += float(rewards[one])
            expected = gae_by_hand(tokens, batch.values[own].tolist(), 0.9, 0.8)
            np.testing.assert_allclose(batch.advantages[own], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.returns[own], batch.advantages[own] + batch.values[own], atol=1e-5)


def test_whitened_advantages_leave_the_returns_as_they_are() -> None:
    batch = make_batch([[1], [5]], [2, 3], values=[0.5, 1, 0, 2, 3], mask=[1, 1, 1, 0, 1])
    plain, white = estimate(batch, GAE), estimate(batch, {**GAE, "whiten": True})
    np.testing.assert_array_equal(plain.returns, white.returns)
    assert white.advantages[batch.mask].mean() == pytest.approx(0, abs=1e-6)
    assert white.advantages[batch.mask].std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert white.advantages[3] == 0


def test_a_perfect_critic_leaves_no_advantage() -> None:
    batch = make_batch([[2]], [4], values=[2, 2, 2, 2])
    found = estimate(batch, {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": False})
    assert (found.advantages == 0).all() and (found.returns == 2).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_have_advantage_zero_and_may_hold_anything(name: str) -> None:
    hole = [0.0, np.nan, -1.0, np.nan]
    batch = make_batch(
        [[1.0], [0.0]], [2, 2], mask=[1, 0, 1, 0], values=hole, logprobs=hole, reference=hole, baseline=[0.2, 0.4]
    )
    found = advantages(batch, name=name, **PENALTY)
    assert np.isfinite(found).all() and (found[[1, 3]] == 0).all()


@pytest.mark.parametrize("spec", [GrpoSpec, RlooSpec, RemaxSpec, ReinforceSpec, PpoSpec])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_every_algorithm_of_a_job_names_an_estimator_and_losses_that_exist(spec: Any, placement: Any) -> None:
    algorithm = spec(kl={"beta": 0.1, "placement": placement})
    columns = {name: np.zeros(4) for name in ("values", "reference")}
    batch = estimate(make_batch([[0, 1]], [2, 2], baseline=[0.5], **columns), algorithm.estimator_options())
    assert np.isfinite(batch.advantages).all() and (len(batch.returns) > 0) == algorithm.needs_critic
    assert isinstance(make_loss(algorithm.loss_options()), PolicyLoss)
    if algorithm.needs_critic:
        assert isinstance(make_loss(algorithm.value_loss_options()), ValueLoss)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_batch_has_empty_advantages(name: str) -> None:
    assert len(advantages(make_batch([], []), name=name)) == 0


def test_an_unscored_sequence_is_named() -> None:
    with pytest.raises(InvalidInput, match="sequence 1 has reward nan"):
        advantages(make_batch([[0, np.nan]], [1, 1]), name="group")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "advantages.name"),
        ({"name": "grpo"}, "advantages.name"),
        ({"name": "group", "lam": 0.9}, "advantages.lam"),
        ({"name": "group", "scale_by_std": 1}, "advantages.scale_by_std"),
        ({"name": "gae", "gamma": 1.5}, "advantages.gamma"),
        ({"name": "gae", "lam": "high"}, "advantages.lam"),
        ({"name": "to-go", "gamma": float("nan")}, "advantages.gamma"),
        ({"name": "group", "kl_beta": -0.1}, "advantages.kl_beta"),
        ({"name": "group", "kl_beta": "some"}, "advantages.kl_beta"),
        ({"name": "group", "kl_estimator": "k4"}, "advantages.kl_estimator"),
        ({"name": "gae"}, "values"),
        ({"name": "greedy"}, "baseline"),
        ({"name": "group", "kl_beta": 0.1}, "reference"),
    ],
)
def test_bad_options_and_missing_columns_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        estimate(make_batch([[0, 1]], [1, 1]), options)
    assert caught.value.details["field"] == field
