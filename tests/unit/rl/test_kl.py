"""Estimates of KL against brute force over a vocabulary of five: their expectations, and those of their gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nereus_common.rl.advantages import kl_of_tokens
from nereus_common.rl.kl import Estimator, Gradient, kl_estimate, kl_penalty

pytestmark = pytest.mark.fast
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, of where the tokens were sampled and of the reference."""
    draw = torch.Generator().manual_seed(seed)
    policy, sampled, reference = torch.randn(3, 5, dtype=torch.float64, generator=draw)
    return policy.requires_grad_(), sampled, reference


def divergence(of: Tensor, to: Tensor) -> Tensor:
    """KL(of ‖ to), exact."""
    p, q = of.log_softmax(0), to.log_softmax(0)
    return (p.exp() * (p - q)).sum()


def gradient(value: Tensor, policy: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy)[0]


def expected_penalty(
    policy: Tensor, sampled: Tensor, reference: Tensor, estimator: Estimator, kind: Gradient
) -> Tensor:
    """Σ over the vocabulary of the probability of sampling a token times its penalty."""
    logprobs, behind = policy.log_softmax(0), sampled.detach().log_softmax(0)
    ratio = torch.exp(logprobs - behind)
    return (behind.exp() * kl_penalty(logprobs, reference.log_softmax(0), ratio, estimator, kind)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(4))
def test_k1_and_k3_are_unbiased(estimator: Estimator, seed: int) -> None:
    policy, _, reference = policies(seed)
    found = expected_penalty(policy, policy, reference, estimator, "plain")
    torch.testing.assert_close(found, divergence(policy, reference))


def test_k2_is_biased_and_no_estimate_but_k1_is_ever_negative() -> None:
    policy, _, reference = policies(0)
    found = expected_penalty(policy, policy, reference, "k2", "plain")
    assert abs(float((found - divergence(policy, reference)).detach())) > 0.01
    log_ratio = torch.linspace(-3, 3, 50)
    assert (kl_estimate(log_ratio, "k1") < 0).any()
    assert (kl_estimate(log_ratio, "k2") >= 0).all() and (kl_estimate(log_ratio, "k3") >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("on_policy", [True, False])
def test_a_corrected_gradient_is_that_of_the_exact_divergence(estimator: Estimator, seed: int, on_policy: bool) -> None:
    policy, sampled, reference = policies(seed)
    found = expected_penalty(policy, policy if on_policy else sampled, reference, estimator, "corrected")
    torch.testing.assert_close(gradient(found, policy), gradient(divergence(policy, reference), policy))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_corrected_value_stays_unbiased_away_from_where_tokens_were_sampled(estimator: Estimator) -> None:
    policy, sampled, reference = policies(1)
    found = expected_penalty(policy, sampled, reference, estimator, "corrected")
    torch.testing.assert_close(found, divergence(policy, reference))


PLAIN: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda policy, reference: policy.sum() * 0,
    "k2": divergence,
    "k3": lambda policy, reference: divergence(reference, policy),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(4))
def test_a_plain_gradient_is_nothing_for_k1_and_the_reverse_divergence_for_k3(estimator: Estimator, seed: int) -> None:
    policy, _, reference = policies(seed)
    found = gradient(expected_penalty(policy, policy, reference, estimator, "plain"), policy)
    torch.testing.assert_close(found, gradient(PLAIN[estimator](policy, reference), policy))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_penalties_in_rewards_and_in_losses_are_the_same_estimate(estimator: Estimator) -> None:
    log_ratio = np.linspace(-2, 2, 9)
    np.testing.assert_allclose(
        kl_of_tokens(log_ratio, estimator), kl_estimate(torch.as_tensor(log_ratio), estimator).numpy(), rtol=1e-15
    )
