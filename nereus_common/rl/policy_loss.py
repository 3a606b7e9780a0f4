"""The policy's loss: PPO's clipped surrogate with the variants that GRPO and its kin ask for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.kl import Estimator, Gradient, kl_penalty
from nereus_common.rl.loss_sums import LossSums, real_or
from nereus_common.rl.options import bounded


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """R tokens of one pack, whole sequences. All [R]; `logprobs` carries the gradient, the others none.

    weight: the token's share in the loss of its minibatch, 0 for a masked or padding token. counted: whether it is
    neither; where it is not, the other columns may hold anything, NaN included. fresh: counted, and sampled by the
    very version that this step starts from. sequence: a number of its sequence in the pack. behaviour: the sampler's
    log-probs. proximal: the trainer's own before the step; None where `logprobs` are just those. reference: of the
    reference model, None without a KL term.
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

    def settled(self) -> TokenBatch:
        """The same with a ratio of 1, an advantage and a KL of 0 wherever a token does not count."""
        nothing = torch.zeros_like(self.logprobs)
        logprobs = real_or(self.counted, self.logprobs, nothing)

        def known(column: Tensor) -> Tensor:
            return real_or(self.counted, column, nothing)

        return replace(
            self,
            logprobs=logprobs,
            advantages=known(self.advantages),
            behaviour=known(self.behaviour),
            proximal=logprobs.detach() if self.proximal is None else known(self.proximal),
            reference=None if self.reference is None else known(self.reference),
        )


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Options as `nereus.spec.algorithms.PolicySpec` explains them.

    With ratio ρ and advantage A a token loses −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) (Schulman et al. 2017,
    arXiv 1707.06347, eq. 7), at most −`dual_clip` · A where A < 0 (Ye et al. 2020, arXiv 1912.09729).

    Two ratios with two denominators (decoupled PPO; Hilton et al. 2021, arXiv 2110.00641): the clipped one is to
    `proximal`, the policy before the step as the trainer's own kernels see it, so it is exactly 1 at the first update;
    what separates the sampler from it (other kernels, older versions, truncated sampling) is the weight that `tis_cap`
    bounds.

    `kl_beta` times the penalty of `rl.kl` comes on top, which that weight and the token's ratio also correct.

    `ratio`: of each token; or for all tokens of a sequence the geometric mean of theirs (`sequence`; GSPO) or their
    product (`trajectory`: the whole response is one action, as RLOO has it and TRL's RLOOTrainer clips it).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio: Literal["token", "sequence", "trajectory"] = "token"
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
        self.check_columns({"reference"} if tokens.reference is not None else ())
        tokens = tokens.settled()
        assert tokens.proximal is not None
        log_ratio = tokens.logprobs - tokens.proximal
        ratio = torch.exp(log_ratio if self.ratio == "token" else self._over_sequences(tokens, log_ratio))
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -self._gain(ratio, clipped, tokens.advantages)
        stands_for = torch.exp(log_ratio)
        if self.tis_cap is not None:
            trust = torch.exp(tokens.proximal - tokens.behaviour).clamp(max=self.tis_cap)
            per_token, stands_for = per_token * trust, stands_for * trust
        divergence = self._divergence(tokens, stands_for)
        if self.kl_beta:
            per_token = per_token + self.kl_beta * divergence
        return self._sums((per_token * tokens.weight).sum(), tokens, ratio, clipped, divergence)

    def _gain(self, ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is None:
            return gain
        return torch.where(advantages < 0, torch.maximum(gain, self.dual_clip * advantages), gain)

    def _divergence(self, tokens: TokenBatch, stands_for: Tensor) -> Tensor:
        """KL to the reference per token, also where it is only reported (a penalty in the reward); 0 without one."""
        if tokens.reference is None:
            return torch.zeros_like(stands_for)
        return kl_penalty(tokens.logprobs, tokens.reference, stands_for, self.kl_estimator, self.kl_gradient)

    def _over_sequences(self, tokens: TokenBatch, log_ratio: Tensor) -> Tensor:
        """[R] the mean or the sum of the sequence's log-ratios, on each of its tokens."""
        counted = tokens.counted.to(log_ratio.dtype)
        size = int(tokens.sequence.max()) + 1 if len(tokens.sequence) else 0
        zeros = torch.zeros(size, dtype=log_ratio.dtype, device=log_ratio.device)
        whole = zeros.index_add(0, tokens.sequence, log_ratio * counted)
        if self.ratio == "sequence":
            whole = whole / zeros.index_add(0, tokens.sequence, counted).clamp(min=1)
        return whole[tokens.sequence]

    def _sums(self, loss: Tensor, tokens: TokenBatch, ratio: Tensor, clipped: Tensor, divergence: Tensor) -> LossSums:
        """With `approx_kl` the k3 estimate of KL(sampler ‖ policy).

        `logprob_gap` is the distance of the sampler's log-probs from those of the policy before the step: what it
        measures is kernels, not what the step has learnt so far.
        """
        assert tokens.proximal is not None
        moved, gap = tokens.logprobs.detach() - tokens.behaviour, (tokens.proximal - tokens.behaviour).abs()
        means = {
            "clip_fraction": (ratio * tokens.advantages > clipped * tokens.advantages, tokens.counted),
            "approx_kl": (torch.exp(moved) - 1 - moved, tokens.counted),
            "reference_kl": (divergence, tokens.counted),
            "entropy": (tokens.entropy, tokens.counted),
            "ratio": (ratio, tokens.counted),
            "logprob_gap": (gap, tokens.fresh),
        }
        largest = {"logprob_gap_max": (gap, tokens.fresh), "ratio_max": (ratio, tokens.counted)}
        return LossSums.of(loss, means, largest)
