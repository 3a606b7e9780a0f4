"""What the sampler did and what the trainer makes of it: temperature, truncated sampling, ends of responses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nereus_common.engines.torch_model.head import token_logprobs
from nereus_common.rl.advantages import estimate
from nereus_common.rl.assembly import Completion, Group, assemble
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.rollouts import RolloutBatch
from tests.unit.rl.batches import make_batch, tokens_of, weighted

pytestmark = pytest.mark.fast

LOGITS = [2.0, 1.0, 0.0, -1.0]
PLACE_REWARDS = {"name": "gae", "gamma": 0.0, "lam": 0.0, "whiten": False}
"""With values of 0, the advantage of a token is then its own reward."""


def trainer_logprobs(tokens: list[int], temperature: float) -> Tensor:
    """By the training engine's own head, whose logits are `LOGITS` in every row."""
    hidden = torch.tensor([LOGITS] * len(tokens), dtype=torch.float64)
    return token_logprobs(hidden, torch.eye(4, dtype=torch.float64), torch.tensor(tokens), temperature)[0]


def sampled_batch(tokens: list[int], logprobs: list[float]) -> RolloutBatch:
    batch = make_batch([[1.0]], [len(tokens)], logprobs=logprobs, advantages=np.ones(len(tokens)))
    return weighted(batch, "token")


def test_the_trainer_divides_logits_by_the_temperature_as_the_sampler_does() -> None:
    trained = trainer_logprobs([0, 1, 2, 3], 0.6)
    torch.testing.assert_close(
        trained, torch.tensor([-0.20806, -1.874727, -3.541394, -5.20806]).double(), atol=1e-6, rtol=0
    )
    raw = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(0)
    wrong = {
        "a sampler that reports without temperature": (trained - raw).exp(),
        "log-probs divided by the temperature": (trained - raw / 0.6).exp(),
    }
    expected = {
        "a sampler that reports without temperature": [1.261283, 0.647564, 0.332471, 0.170696],
        "log-probs divided by the temperature": [1.691455] * 4,
    }
    for name, ratio in wrong.items():
        torch.testing.assert_close(ratio, torch.tensor(expected[name]).double(), atol=1e-6, rtol=0)
        assert float((ratio - 1).abs().max()) > 0.1


def test_an_unchanged_policy_has_no_gap_over_a_thousand_samples() -> None:
    draw = np.random.default_rng(0)
    scaled = np.array(LOGITS) / 0.6
    stored = scaled - np.log(np.exp(scaled).sum())
    tokens = draw.choice(4, size=1000, p=np.exp(stored)).tolist()
    outcome = PolicyLoss()(tokens_of(sampled_batch(tokens, stored[tokens].tolist()), trainer_logprobs(tokens, 0.6)))
    assert float(outcome.largest["logprob_gap_max"]) < 1e-6
    assert float(outcome.means["ratio"][0]) == 1000
    assert abs(float(outcome.means["approx_kl"][0])) < 1e-6


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_truncated_sampler_leaves_the_ratio_at_one_and_shows_in_the_importance_weight(ratio: str) -> None:
    kept = math.exp(2) + math.exp(1)
    mass = kept / (kept + 1 + math.exp(-1))
    assert mass == pytest.approx(0.880797, abs=1e-6)
    tokens = [0, 1, 0]
    batch = sampled_batch(tokens, [LOGITS[token] - math.log(kept) for token in tokens])
    logprobs = trainer_logprobs(tokens, 1.0)
    outcome = PolicyLoss(ratio=ratio)(tokens_of(batch, logprobs))  # type: ignore[arg-type]
    assert float(outcome.largest["ratio_max"]) == 1.0 and float(outcome.loss) == pytest.approx(-1.0)
    weighed = PolicyLoss(ratio=ratio, tis_cap=2.0)(tokens_of(batch, logprobs))  # type: ignore[arg-type]
    assert float(weighed.largest["ratio_max"]) == 1.0 and float(weighed.loss) == pytest.approx(-mass)


def completed(tokens: tuple[int, ...], *, finished: bool, mask: tuple[bool, ...] = ()) -> Completion:
    nothing = (0,) * len(tokens)
    return Completion(tokens, tuple(map(float, nothing)), nothing, finished, mask, reward=1.0)


RESPONSES = {
    "an end of the pad's id": completed((5, 6, 2), finished=True),
    "an end within": completed((5, 2, 2), finished=True),
    "cut at the limit": completed((5, 6, 7, 8, 9), finished=False),
    "an environment's last word": completed((5, 6, 7, 7), finished=True, mask=(True, True, False, False)),
}
SCORED = {"an end of the pad's id": 2, "an end within": 2, "cut at the limit": 4, "an environment's last word": 1}


def scored_batch(names: list[str]) -> RolloutBatch:
    batch = assemble([Group(0, (1,), (RESPONSES[name],)) for name in names])
    return estimate(batch.with_columns(values=np.zeros(len(batch.mask))), PLACE_REWARDS)


@pytest.mark.parametrize("order", [list(RESPONSES), list(RESPONSES)[::-1]])
def test_every_sampled_token_counts_and_the_score_is_on_the_last(order: list[str]) -> None:
    batch = scored_batch(order)
    for sequence, name in enumerate(order):
        span = batch.span(sequence)
        assert batch.mask[span].tolist() == list(RESPONSES[name].sampled)
        rewards = batch.advantages[span]
        assert np.flatnonzero(rewards).tolist() == [SCORED[name]] and rewards.sum() == 1.0


def test_a_sampled_end_gets_gradient_and_what_was_not_sampled_gets_none() -> None:
    batch = weighted(scored_batch(list(RESPONSES)), "token")
    batch = batch.with_columns(advantages=np.ones(len(batch.mask)))
    logits = torch.zeros(len(batch.mask), 10, requires_grad=True)
    targets = torch.as_tensor(batch.response_tokens).long()
    logprobs, _ = token_logprobs(logits, torch.eye(10), targets, 1.0)
    PolicyLoss()(tokens_of(batch, logprobs)).loss.backward()
    assert logits.grad is not None
    sampled = torch.as_tensor(batch.mask)
    assert (logits.grad[torch.arange(len(targets)), targets][sampled] < 0).all()
    assert (logits.grad[~sampled] == 0).all()
    ends = {name: batch.span(sequence).stop - 1 for sequence, name in enumerate(RESPONSES)}
    assert float(logits.grad[ends["an end of the pad's id"], 2]) < 0
    assert float(logits.grad[ends["cut at the limit"], 2]) > 0
