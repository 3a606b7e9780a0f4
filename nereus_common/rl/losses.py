"""Policy losses as sums over tokens.

A loss is a sum over local tokens divided by the number of unmasked tokens of the *global* batch, so that adding the
gradients of all microbatches and all data-parallel ranks gives the gradient of the global token mean, however the
batch is cut. Nothing here divides by a local count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereus_common.core.errors import InvalidInput

MEANS = ("loss", "clip_fraction", "approx_kl", "reference_kl", "entropy", "logprob_gap")
"""Metrics that are sums over tokens, to be divided by the global token count."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """R tokens of one microbatch. All [R]; `logprobs` carries the gradient, the others none.

    weight: 1 for a token that counts, 0 for a masked or padding token. behaviour: the sampler's log-probs.
    proximal: log-probs at the start of the step, None when the step makes one update (they equal `logprobs`).
    reference: log-probs of the reference model, None without a KL term.
    """

    logprobs: Tensor
    weight: Tensor
    advantages: Tensor
    behaviour: Tensor
    entropy: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """`loss`: 0-d, to be differentiated. `sums`: detached sums over tokens by `MEANS`. `gap_max`: largest gap."""

    loss: Tensor
    sums: dict[str, Tensor]
    gap_max: Tensor


@dataclass(frozen=True, slots=True)
class Grpo:
    """PPO's clipped surrogate on group advantages; clip bounds may differ (DAPO's clip-higher).

    tis_cap: truncated importance sampling, the weight min(exp(trainer − sampler), cap) for tokens whose sampler
    differs from the trainer. kl_beta: weight of the k3 estimate of KL(policy ‖ reference) (Schulman 2020).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    tis_cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_beta"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"loss.{name} is {getattr(self, name)}", remedy="at least 0", field=f"loss.{name}")
        if self.tis_cap is not None and self.tis_cap <= 0:
            raise InvalidInput(f"loss.tis_cap is {self.tis_cap}", remedy="above 0, or null", field="loss.tis_cap")

    def check_columns(self, names: Collection[str]) -> None:
        """InvalidInput when the loss needs a column that is not among `names`."""
        if self.kl_beta and "reference" not in names:
            raise InvalidInput(
                "loss.kl_beta is set and the batch has no reference log-probs",
                remedy="score the batch with the reference model, or set kl_beta to 0",
                field="reference",
            )

    def __call__(self, tokens: TokenBatch, global_tokens: int) -> LossSums:
        """`global_tokens`: unmasked tokens of the whole batch."""
        real = tokens.weight > 0
        current = tokens.logprobs.detach()
        proximal = current if tokens.proximal is None else _where(real, tokens.proximal)
        behaviour, advantages = _where(real, tokens.behaviour, current), _where(real, tokens.advantages)
        ratio = torch.exp(tokens.logprobs - proximal)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.tis_cap is not None:
            per_token = per_token * torch.exp(proximal - behaviour).clamp(max=self.tis_cap)
        reference_kl = torch.zeros_like(current)
        if self.kl_beta:
            self.check_columns({"reference"} if tokens.reference is not None else ())
            assert tokens.reference is not None
            divergence = _k3(tokens.logprobs, _where(real, tokens.reference, current))
            per_token, reference_kl = per_token + self.kl_beta * divergence, divergence.detach()
        weighted = (per_token * tokens.weight).sum()
        gap = (current - behaviour).abs() * tokens.weight
        sums = {
            "loss": weighted.detach(),
            "clip_fraction": ((ratio * advantages > clipped * advantages) * tokens.weight).sum().detach(),
            "approx_kl": (_k3(behaviour, current) * tokens.weight).sum(),
            "reference_kl": (reference_kl * tokens.weight).sum(),
            "entropy": (tokens.entropy * tokens.weight).sum(),
            "logprob_gap": gap.sum(),
        }
        return LossSums(weighted / max(global_tokens, 1), sums, gap.max() if len(gap) else gap.new_zeros(()))


def _where(real: Tensor, values: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Masked tokens may carry NaN; 0 × NaN would reach the sum."""
    return torch.where(real, values, torch.zeros_like(values) if otherwise is None else otherwise.to(values.dtype))


def _k3(sampled_under: Tensor, other: Tensor) -> Tensor:
    """Estimate of KL(p ‖ q) from tokens of p: q/p − 1 − log(q/p), never negative."""
    log_ratio = other - sampled_under
    return torch.exp(log_ratio) - 1 - log_ratio


LOSSES: dict[str, type[Grpo]] = {"grpo": Grpo}


def make_loss(options: Mapping[str, Any]) -> Grpo:
    """The loss that `{"name": "grpo", …}` asks for; InvalidInput names an unknown name, option or a wrong type."""
    name = options.get("name")
    if name not in LOSSES:
        raise InvalidInput(f"loss.name is {name!r}", remedy=f"known: {', '.join(sorted(LOSSES))}", field="loss.name")
    kind = LOSSES[str(name)]
    known = {option.name for option in dataclasses.fields(kind)}
    given = {key: value for key, value in options.items() if key != "name"}
    for key, value in given.items():
        if key not in known:
            raise InvalidInput(
                f"loss.{key} is unknown to {name}", remedy=f"known: {', '.join(sorted(known))}", field=f"loss.{key}"
            )
        optional = key == "tis_cap" and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidInput(f"loss.{key} is {value!r}, not a number", field=f"loss.{key}")
    return kind(**given)
