"""Estimates of KL(policy ‖ reference) from single tokens of the policy (Schulman 2020, "Approximating KL divergence").

With r = log(policy / reference) of the sampled token: k1 = r, k2 = r² / 2, k3 = exp(-r) - 1 + r. As values k1 and k3
are unbiased. As losses they mislead: the expected gradient of k1 is 0, that of k3 belongs to KL(reference ‖ policy);
only that of k2, r ∇log policy, is the gradient of KL(policy ‖ reference) (Tang & Munos 2025, arXiv 2506.09477).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Gradient = Literal["corrected", "plain"]


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Per token, from log(policy / reference)."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.exp(-log_ratio) - 1 + log_ratio


def kl_penalty(logprobs: Tensor, reference: Tensor, ratio: Tensor, estimator: Estimator, gradient: Gradient) -> Tensor:
    """Per token, to be differentiated with respect to `logprobs`.

    `ratio`: the policy to the one that the tokens stand for. `plain` is the estimate as it stands. `corrected` has the
    estimate's value and, whatever the estimator, the gradient ratio · r · ∇log policy: both weighted by the ratio, so
    that they stay right after the policy has moved away from where the tokens were sampled.
    """
    if gradient == "plain":
        return kl_estimate(logprobs - reference, estimator)
    current, weight = logprobs.detach(), ratio.detach()
    log_ratio = current - reference
    return weight * (kl_estimate(log_ratio, estimator) + log_ratio * (logprobs - current))
