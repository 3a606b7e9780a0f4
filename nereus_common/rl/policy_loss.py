"""The policy's loss: PPO's clipped surrogate with the variants that GRPO and its kin ask for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.kl import Estimator, Gradient, kl_penalty
from nereus_common.rl.loss_sums import LossSums, bounded, real_or


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """R tokens of one pack, whole sequences. All [R]; `logprobs` carries the gradient, the others none.

    weight: the token's share in the loss of its minibatch, 0 for a masked or padding token. counted: whether it is
    neither. fresh: counted, and sampled by the very version that this step starts from. sequence: a number of its
    sequence in the pack. behaviour: the sampler's log-probs. proximal: the trainer's own before the step; None where
    `logprobs` are just those. reference: of the reference model, None without a KL term.
    """

    logprobs: Tensor
    entropy: Tensor
    weight: Tensor
    counted: Tensor
    fresh: Tensor
    sequence: Tensor
    advantages: Tensor
    behaviour: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Options as `nereus.spec.algorithms.PolicySpec` explains them.

    Two ratios with two denominators (decoupled PPO; Hilton et al. 2021, arXiv 2110.00641): the clipped one is to
    `proximal`, the policy before the step as the trainer's own kernels see it, so it is exactly 1 at the first update;
    what separates the sampler from it (other kernels, older versions, truncated sampling) is the weight that `tis_cap`
    bounds.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    tis_cap: float | None = None
    kl_beta: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_gradient: Gradient = "corrected"

    MEANS: ClassVar = ("clip_fraction", "approx_kl", "reference_kl", "entropy", "ratio", "logprob_gap")
    LARGEST: ClassVar = ("logprob_gap_max", "ratio_max")

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_beta"):
            bounded(f"loss.{name}", getattr(self, name), at_least=0)
        if self.tis_cap is not None:
            bounded("loss.tis_cap", self.tis_cap, above=0)
        if self.dual_clip is not None:
            bounded("loss.dual_clip", self.dual_clip, above=1)

    def check_columns(self, names: Collection[str]) -> None:
        """InvalidInput when the loss needs a column that is not among `names`."""
        if self.kl_beta and "reference" not in names:
            raise InvalidInput(
                "loss.kl_beta is set and the batch has no reference log-probs",
                remedy="score the batch with the reference model, or set kl_beta to 0",
                field="reference",
            )

    def __call__(self, tokens: TokenBatch) -> LossSums:
        current = tokens.logprobs.detach()
        advantages = real_or(tokens.counted, tokens.advantages, torch.zeros_like(current))
        behaviour = real_or(tokens.counted, tokens.behaviour, current)
        proximal = current if tokens.proximal is None else real_or(tokens.counted, tokens.proximal, current)
        token_ratio = torch.exp(tokens.logprobs - proximal)
        ratio = token_ratio if self.ratio == "token" else self._sequence_ratio(tokens, proximal)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self.dual_clip * advantages), gain)
        per_token = -gain
        if self.tis_cap is not None:
            per_token = per_token * torch.exp(proximal - behaviour).clamp(max=self.tis_cap)
        divergence = torch.zeros_like(current)
        if self.kl_beta:
            self.check_columns({"reference"} if tokens.reference is not None else ())
            assert tokens.reference is not None
            reference = real_or(tokens.counted, tokens.reference, current)
            divergence = kl_penalty(tokens.logprobs, reference, token_ratio, self.kl_estimator, self.kl_gradient)
            per_token = per_token + self.kl_beta * divergence
        loss = (per_token * tokens.weight).sum()
        # To the policy before the step: what it measures is kernels, not what the step has learnt so far.
        gap = (proximal - behaviour).abs()
        moved = current - behaviour
        means = {
            "clip_fraction": (ratio * advantages > clipped * advantages, tokens.counted),
            "approx_kl": (torch.exp(moved) - 1 - moved, tokens.counted),
            "reference_kl": (divergence, tokens.counted),
            "entropy": (tokens.entropy, tokens.counted),
            "ratio": (ratio, tokens.counted),
            "logprob_gap": (gap, tokens.fresh),
        }
        largest = {"logprob_gap_max": (gap, tokens.fresh), "ratio_max": (ratio, tokens.counted)}
        return LossSums.of(loss, means, largest)

    def _sequence_ratio(self, tokens: TokenBatch, proximal: Tensor) -> Tensor:
        """[R] the geometric mean of the sequence's token ratios, on each of its tokens."""
        counted = tokens.counted.to(tokens.logprobs.dtype)
        size = int(tokens.sequence.max()) + 1 if len(tokens.sequence) else 0
        zeros = torch.zeros(size, dtype=tokens.logprobs.dtype, device=tokens.logprobs.device)
        log_ratio = zeros.index_add(0, tokens.sequence, (tokens.logprobs - proximal) * counted)
        lengths = zeros.index_add(0, tokens.sequence, counted)
        return torch.exp(log_ratio / lengths.clamp(min=1))[tokens.sequence]
