"""The loss and its gradient do not depend on how the batch is cut; what does not count cannot reach them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.losses import make_loss
from nereus_common.rl.policy_loss import PolicyLoss, TokenBatch
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.value_loss import ValueBatch, ValueLoss
from nereus_common.rl.weights import Aggregation
from tests.unit.rl.batches import make_batch, tokens_of, weighted

pytestmark = pytest.mark.fast

PLAIN = PolicyLoss()
TOKEN_LOSSES = [[1.0] * 2, [0.1] * 10, [0.5] * 4, [3.0]]
"""Four sequences of 17 tokens, whose losses sum to 8."""
EXPECTED: dict[Aggregation, float] = {"token": 8 / 17, "sequence": (1 + 0.1 + 0.5 + 3) / 4, "constant": 8 / (4 * 10)}
WRONG_TOKEN_MEANS = {
    "mean of microbatch means": (1 + 0.1 + 0.5 + 3) / 4,
    "mean of two ranks' token means": (3 / 12 + 5 / 5) / 2,
    "divided once more by the accumulation count": 8 / 17 / 2,
}
CUTS = [
    [[0, 1, 2, 3]],
    [[0, 1], [2, 3]],
    [[0], [1], [2], [3]],
    [[3, 0], [], [2], [1]],
    [[], [0, 1, 2, 3]],
]


def linear_loss(aggregation: Aggregation, cuts: Sequence[Sequence[int]], *, masked: bool) -> tuple[float, Tensor]:
    """Loss and gradient of a linear model, one backward pass per microbatch.

    `masked`: four more tokens at the first sequence's end, and a whole sequence, that do not count and are NaN.
    """
    losses = [[*TOKEN_LOSSES[0], *[math.nan] * 4 * masked], *TOKEN_LOSSES[1:], *[[math.nan] * 3] * masked]
    flat = np.array([loss for one in losses for loss in one])
    batch = make_batch([[0.0] * len(losses)], [len(one) for one in losses], advantages=-flat, mask=~np.isnan(flat))
    if masked:
        batch = batch.with_columns(logprobs=np.where(batch.mask, 0, np.nan))
    batch = weighted(batch, aggregation, longest=10)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(17, 3, dtype=torch.float64, generator=draw)
    features = torch.zeros(len(flat), 3, dtype=torch.float64)
    features[torch.as_tensor(batch.mask)] = drawn
    model = torch.ones(3, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for cut in cuts:
        cut = [*cut, 4] if masked and 0 in cut else cut
        logprobs = features @ model
        if masked:
            logprobs = torch.where(torch.as_tensor(batch.mask), logprobs, math.nan)
        loss = PLAIN(tokens_of(batch, logprobs, sequences=cut)).loss
        loss.backward()
        total += float(loss.detach())
    assert model.grad is not None
    return total, model.grad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("aggregation", EXPECTED)
def test_loss_and_gradient_are_the_same_for_every_cut(
    aggregation: Aggregation, cuts: list[list[int]], masked: bool
) -> None:
    whole, gradient = linear_loss(aggregation, [[0, 1, 2, 3]], masked=masked)
    loss, found = linear_loss(aggregation, cuts, masked=masked)
    assert loss == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)
    expected = EXPECTED[aggregation] * (4 / 5 if masked and aggregation == "constant" else 1)
    assert loss == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_what_is_masked_changes_neither_loss_nor_gradient(aggregation: Aggregation) -> None:
    loss, gradient = linear_loss(aggregation, CUTS[0], masked=False)
    found, with_masked = linear_loss(aggregation, CUTS[0], masked=True)
    assert found == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(with_masked, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", WRONG_TOKEN_MEANS)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_token_mean_is_none_of_the_usual_mistakes(cuts: list[list[int]], wrong: str) -> None:
    assert abs(linear_loss("token", cuts, masked=True)[0] - WRONG_TOKEN_MEANS[wrong]) > 0.1


OPTIONS = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from(["token", "sequence", "trajectory"]),
        "dual_clip": st.sampled_from([None, 1.5]),
        "tis_cap": st.sampled_from([None, 1.1]),
        "kl_beta": st.sampled_from([0.0, 0.5]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "kl_gradient": st.sampled_from(["corrected", "plain"]),
    }
)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[RolloutBatch, Tensor, Tensor, list[list[int]]]:
    """A random batch, log-probs before and after an update, and its sequences dealt to microbatches."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = sum(lengths)
    mask = random.random(size) < 0.7

    def drawn(scale: float) -> np.ndarray[Any, Any]:
        return np.where(mask, random.normal(-1, scale, size), np.nan)

    batch = make_batch(
        [[0.0] * len(lengths)], lengths, mask=mask, advantages=drawn(1), logprobs=drawn(0.3), reference=drawn(0.5)
    )
    before = torch.as_tensor(random.normal(-1, 0.3, size))
    parts = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    order = draw(st.permutations(range(len(lengths))))
    cuts = [[one for one in order if parts[one] == part] for part in range(4)]
    return batch, before, before + torch.as_tensor(random.normal(0, 0.3, size)), cuts


@given(cut_batches(), OPTIONS, st.sampled_from(["token", "sequence", "constant"]), st.booleans())
def test_every_variant_is_the_same_for_every_cut(
    case: tuple[RolloutBatch, Tensor, Tensor, list[list[int]]],
    options: dict[str, Any],
    aggregation: Aggregation,
    first: bool,
) -> None:
    batch, before, now, cuts = case
    batch = weighted(batch, aggregation, longest=5)

    def run(parts: list[list[int]]) -> tuple[float, Tensor]:
        leaf = now.clone().requires_grad_()
        loss = sum(
            PolicyLoss(**options)(tokens_of(batch, leaf, proximal=None if first else before, sequences=part)).loss
            for part in parts
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        assert leaf.grad is not None
        return float(loss.detach()), leaf.grad

    whole, gradient = run([list(range(batch.sequences))])
    loss, found = run(cuts)
    assert math.isfinite(whole) and loss == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert bool((gradient[~torch.as_tensor(batch.mask)] == 0).all())
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)


@given(cut_batches(), OPTIONS)
def test_without_proximal_log_probs_the_ratio_is_exactly_one(
    case: tuple[RolloutBatch, Tensor, Tensor, list[list[int]]], options: dict[str, Any]
) -> None:
    batch, _, now, _ = case
    outcome = PolicyLoss(**options)(tokens_of(weighted(batch, "token"), now.float()))
    total, count = outcome.means["ratio"]
    assert float(total) == float(count) == batch.loss_tokens
    assert float(outcome.largest["ratio_max"]) == (1.0 if batch.loss_tokens else 0.0)
    assert float(outcome.means["clip_fraction"][0]) == 0


def by_hand(
    logprobs: Tensor, advantages: Sequence[float], *, mask: Sequence[bool] | None = None, **columns: Tensor
) -> TokenBatch:
    """Tokens of weight 1 in one sequence each; the sampler had the trainer's log-probs unless told otherwise."""
    counted = torch.ones(len(advantages), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros(len(advantages)),
        weight=counted.float(),
        counted=counted,
        fresh=counted,
        sequence=torch.arange(len(advantages)),
        advantages=torch.tensor(advantages),
        **{"behaviour": logprobs.detach(), **columns},
    )


def test_a_token_outside_the_clip_range_gives_no_gradient() -> None:
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    proximal = logprobs.detach() - torch.tensor([0.5, -0.5, 0.5, -0.5])
    outcome = PolicyLoss(clip_low=0.2, clip_high=0.3)(by_hand(logprobs, [1, 1, -1, -1], proximal=proximal))
    outcome.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).tolist() == [True, False, False, True]
    assert float(outcome.means["clip_fraction"][0]) == 2


def test_a_dual_clip_bounds_what_a_bad_token_can_lose() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    batch = by_hand(logprobs, [-1.0, 1.0], proximal=torch.tensor([-3.0, -3.0]))
    outcome = PolicyLoss(dual_clip=2.0)(batch)
    assert float(outcome.loss.detach()) == pytest.approx(2.0 - 1.2)


def test_truncated_importance_weights_stop_at_the_cap() -> None:
    batch = by_hand(torch.tensor([-1.0, -1.0]), [1.0, 1.0], behaviour=torch.tensor([-1.5, -9.0]))
    assert float(PolicyLoss(tis_cap=2.0)(batch).loss) == pytest.approx(-(math.exp(0.5) + 2.0))


def test_a_sequence_ratio_is_the_geometric_mean_and_a_trajectory_ratio_the_product() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0])
    batch = by_hand(torch.tensor([-0.9, -0.8, -5.0]), [1.0] * 3, mask=[True, True, False], proximal=proximal)
    batch = replace(batch, sequence=torch.zeros(3, dtype=torch.long))
    mean, product = (float(PolicyLoss(ratio=ratio)(batch).largest["ratio_max"]) for ratio in ("sequence", "trajectory"))
    assert mean == pytest.approx(math.exp(0.15)) and product == pytest.approx(math.exp(0.3))


def test_the_gap_is_the_mean_and_the_largest_distance_from_the_sampler() -> None:
    behaviour = torch.tensor([-1.1, -2.3, math.nan])
    outcome = PLAIN(by_hand(torch.tensor([-1.0, -2.0, -3.0]), [0.0] * 3, mask=[True, True, False], behaviour=behaviour))
    total, count = outcome.means["logprob_gap"]
    assert float(total) == pytest.approx(0.4) and int(count) == 2
    assert float(outcome.largest["logprob_gap_max"]) == pytest.approx(0.3)


def test_the_reference_term_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    outcome = PolicyLoss(kl_beta=0.5)(by_hand(logprobs, [0.0], reference=torch.tensor([-2.0])))
    outcome.loss.backward()
    assert float(outcome.loss.detach()) == pytest.approx(0.5 * math.exp(-1))
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(0.5)


def test_a_penalty_placed_in_the_reward_is_still_reported() -> None:
    outcome = PLAIN(by_hand(torch.tensor([-1.0]), [0.0], reference=torch.tensor([-2.0])))
    assert float(outcome.means["reference_kl"][0]) == pytest.approx(math.exp(-1)) and float(outcome.loss) == 0


def test_an_empty_pack_has_no_loss_and_counts_nothing() -> None:
    outcome = PolicyLoss(ratio="sequence")(by_hand(torch.zeros(0), []))
    assert float(outcome.loss) == 0 and float(outcome.largest["ratio_max"]) == 0


def values_by_hand(values: Tensor, before: Sequence[float], returns: Sequence[float]) -> ValueBatch:
    counted = ~torch.isnan(torch.tensor(returns))
    return ValueBatch(values, counted.float(), counted, torch.tensor(before), torch.tensor(returns))


def test_a_value_that_moved_too_far_towards_its_return_gives_no_gradient() -> None:
    values = torch.tensor([1.0, 0.1, -1.0], requires_grad=True)
    outcome = ValueLoss(clip=0.5)(values_by_hand(values, [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]))
    outcome.loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.9, -3.0]))
    assert float(outcome.loss.detach()) == pytest.approx((1.5**2 + 1.9**2 + 3**2) / 2)
    assert float(outcome.means["value_clip_fraction"][0]) == 1


def test_masked_values_reach_neither_loss_nor_metrics() -> None:
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    outcome = ValueLoss()(values_by_hand(values, [1.0, math.nan], [2.0, math.nan]))
    outcome.loss.backward()
    assert values.grad is not None and values.grad.tolist() == [-1.0, 0.0]
    assert float(outcome.means["value"][0]) == 1 and int(outcome.means["value"][1]) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "loss.name"),
        ({"name": "grpo"}, "loss.name"),
        ({"name": "policy", "clip": 0.1}, "loss.clip"),
        ({"name": "policy", "clip_low": "a lot"}, "loss.clip_low"),
        ({"name": "policy", "clip_low": True}, "loss.clip_low"),
        ({"name": "policy", "clip_low": -1}, "loss.clip_low"),
        ({"name": "policy", "clip_low": None}, "loss.clip_low"),
        ({"name": "policy", "ratio": "word"}, "loss.ratio"),
        ({"name": "policy", "tis_cap": 0}, "loss.tis_cap"),
        ({"name": "policy", "dual_clip": 1}, "loss.dual_clip"),
        ({"name": "value", "clip": 0}, "loss.clip"),
        ({"name": "value", "tis_cap": 2}, "loss.tis_cap"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_loss(options)
    assert caught.value.details["field"] == field


def test_options_by_name_make_the_very_loss() -> None:
    assert make_loss({"name": "policy", "tis_cap": None, "ratio": "sequence"}) == PolicyLoss(ratio="sequence")
    assert make_loss({"name": "value", "clip": None}) == ValueLoss(clip=None)


def test_a_reference_term_without_reference_log_probs_is_refused() -> None:
    with pytest.raises(InvalidInput, match="reference log-probs"):
        PolicyLoss(kl_beta=0.1)(by_hand(torch.zeros(1), [0.0]))
