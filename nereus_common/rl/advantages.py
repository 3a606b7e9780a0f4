"""Advantages by the name of their estimator, over the whole batch of a step, before it is cut over anything.

A penalty for leaving the reference model enters here when it is placed in the reward: with k_t the estimate of
KL(policy ‖ reference) from the sampler's own log-probs of unmasked token t (`rl.kl`),

- group, leave-one-out: the sequence's reward is reward − β Σ_t k_t, and so are those that it is compared with (the
  KL-shaped reward of Ahmadian et al. 2024, arXiv 2402.14740, §2; TRL's RLOOTrainer does the same);
- greedy, to-go, gae: the reward of token t is −β k_t, and the sequence's reward comes on top at its last unmasked token
  (Ziegler et al. 2019, arXiv 1909.08593, §2; Ouyang et al. 2022, arXiv 2203.02155, §3.5), so a token answers only for
  what follows it.

Masked tokens have advantage and return 0. A response that was cut at the length limit counts as ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.options import bounded, by_name, check
from nereus_common.rl.rollouts import COLUMNS, RolloutBatch
from nereus_common.rl.trajectories import Floats, Trajectories, whitened

Columns = dict[str, NDArray[np.float32]]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A batch with finite rewards, the trajectories in it, and what each of their U tokens pays for its KL."""

    batch: RolloutBatch
    tokens: Trajectories
    penalty: Floats

    @property
    def outcomes(self) -> Floats:
        """[N] reward less the sequence's penalties."""
        return self.batch.rewards - self.tokens.totals(self.penalty)

    def token_rewards(self, rewards: Floats) -> Floats:
        """[U] the sequence's reward on its last unmasked token, less every token's penalty."""
        per_token = -self.penalty
        sequences, last = self.tokens.last
        per_token[last] += rewards[sequences]
        return per_token

    def of_group(self, values: Floats) -> Floats:
        """[N] the mean over each sequence's group."""
        group, groups = self.batch.group, self.batch.groups
        size = np.maximum(np.bincount(group, minlength=groups), 1)
        mean: Floats = (np.bincount(group, values, minlength=groups) / size)[group]
        return mean

    def whole(self, advantages: Floats) -> Columns:
        """[N] advantages, the same on every token of a sequence."""
        return {"advantages": self.tokens.spread(advantages[self.tokens.owner])}


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """(reward − group mean) / (group standard deviation + epsilon) (Shao et al. 2024, arXiv 2402.03300, §4.1.2).

    The deviation is the population's, so a group of one has advantage 0; TRL takes the sample's, which makes its
    advantages smaller by √(1 − 1/n). `scale_by_std=False` leaves the division out (Dr. GRPO; Liu et al. 2025, arXiv
    2503.20783).
    """

    scale_by_std: bool = True
    epsilon: float = 1e-4

    def __call__(self, scored: Scored) -> Columns:
        centred = scored.outcomes - scored.of_group(scored.outcomes)
        if self.scale_by_std:
            centred = centred / (np.sqrt(scored.of_group(centred**2)) + self.epsilon)
        return scored.whole(centred)


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Reward − mean reward of the group's other samples (Ahmadian et al. 2024, arXiv 2402.14740, §3, RLOO).

    That is n / (n − 1) times the distance from the mean of all n. A group of one has no baseline: advantage 0.
    """

    def __call__(self, scored: Scored) -> Columns:
        size = np.bincount(scored.batch.group, minlength=scored.batch.groups)[scored.batch.group]
        centred = scored.outcomes - scored.of_group(scored.outcomes)
        return scored.whole(centred * size / np.maximum(size - 1, 1))


@dataclass(frozen=True, slots=True)
class Greedy:
    """Reward − reward of the greedy response to the same prompt (ReMax; Li et al. 2023, arXiv 2310.10505).

    With a KL penalty each token also bears −β times the k of itself and of all later ones: the same expected gradient
    as the sum over the whole sequence, less noise. The baseline bears none.
    """

    def __call__(self, scored: Scored) -> Columns:
        baseline = needed(scored.batch, "baseline", "score the greedy responses first")
        rewards = scored.batch.rewards - baseline.astype(np.float64)[scored.batch.group]
        return {"advantages": scored.tokens.spread(scored.tokens.to_go(scored.token_rewards(rewards), 1.0))}


@dataclass(frozen=True, slots=True)
class RewardToGo:
    """A_t = Σ_{i ≥ t} γ^(i−t) r_i, normalised over the batch's unmasked tokens.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262, §3): there γ = 1, so A_t = reward − β Σ_{i ≥ t} k_i before the
    normalisation. `group_mean`: the reward is first taken relative to its group's mean (REINFORCE++ w/ baseline).
    """

    gamma: float = 1.0
    group_mean: bool = False

    def __post_init__(self) -> None:
        bounded("advantages.gamma", self.gamma, at_least=0, at_most=1)

    def __call__(self, scored: Scored) -> Columns:
        rewards = scored.batch.rewards.astype(np.float64)
        if self.group_mean:
            rewards = rewards - scored.of_group(rewards)
        advantages = scored.tokens.to_go(scored.token_rewards(rewards), self.gamma)
        return {"advantages": scored.tokens.spread(whitened(advantages))}


@dataclass(frozen=True, slots=True)
class GeneralisedAdvantage:
    """A_t = Σ_{i ≥ t} (γλ)^(i−t) δ_i with δ_i = r_i + γ V_{i+1} − V_i, and V = 0 after the last token.

    GAE(γ, λ) (Schulman et al. 2015, arXiv 1506.02438, eq. 16). Returns are A_t + V_t, before `whiten` normalises A over
    the batch's unmasked tokens (Huang et al. 2022, "The 37 implementation details of PPO", details 5 and 7). What an
    environment wrote is skipped: V_{i+1} is the value before the next token that the policy sampled.
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        bounded("advantages.gamma", self.gamma, at_least=0, at_most=1)
        bounded("advantages.lam", self.lam, at_least=0, at_most=1)

    def __call__(self, scored: Scored) -> Columns:
        tokens = scored.tokens
        values = tokens.pick(needed(scored.batch, "values", "have the critic value the batch first"))
        rewards = scored.token_rewards(scored.batch.rewards.astype(np.float64))
        errors = rewards + self.gamma * tokens.following(values) - values
        advantages = tokens.to_go(errors, self.gamma * self.lam)
        returns = advantages + values
        return {
            "advantages": tokens.spread(whitened(advantages) if self.whiten else advantages),
            "returns": tokens.spread(returns),
        }


class Estimator(Protocol):
    def __call__(self, scored: Scored) -> Columns:
        """The columns that it computes, all [R]."""


ESTIMATORS: Mapping[str, type[Estimator]] = {
    "group": GroupRelative,
    "leave-one-out": LeaveOneOut,
    "greedy": Greedy,
    "to-go": RewardToGo,
    "gae": GeneralisedAdvantage,
}


def estimate(batch: RolloutBatch, options: Mapping[str, Any]) -> RolloutBatch:
    """The batch with `advantages`, and for gae `returns`, as `{"name": "group", "kl_beta": 0.0, …}` asks.

    `kl_beta` and `kl_estimator` belong to all estimators. InvalidInput: an unknown name or option, a reward that is
    missing or not finite, a column that the estimator needs and the batch lacks.
    """
    own = dict(options)
    beta, kind = own.pop("kl_beta", 0.0), own.pop("kl_estimator", "k1")
    check("advantages.kl_beta", beta, float)
    check("advantages.kl_estimator", kind, KlEstimator)
    bounded("advantages.kl_beta", beta, at_least=0)
    estimator = by_name(ESTIMATORS, own, "advantages")
    tokens = Trajectories.of(batch)
    needed(batch, "rewards", "score every sequence before computing advantages")
    return batch.with_columns(**estimator(Scored(batch, tokens, _penalty(batch, tokens, beta, kind))))


def _penalty(batch: RolloutBatch, tokens: Trajectories, beta: float, kind: KlEstimator) -> Floats:
    """[U] β · k_t."""
    if not beta:
        return np.zeros(len(tokens.token))
    reference = needed(batch, "reference", "score the batch with the reference model, or set kl_beta to 0")
    log_ratio = tokens.pick(needed(batch, "logprobs", "keep the sampler's log-probs")) - tokens.pick(reference)
    return beta * kl_of_tokens(log_ratio, kind)


def kl_of_tokens(log_ratio: Floats, estimator: KlEstimator) -> Floats:
    """`rl.kl.kl_estimate` for arrays: who computes advantages need not load torch."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return np.square(log_ratio) / 2
        case "k3":
            return np.exp(-log_ratio) - 1 + log_ratio


def needed(batch: RolloutBatch, name: str, remedy: str) -> NDArray[np.float32]:
    """The column; InvalidInput where it is empty, or not finite at an unmasked token, a sequence or a group."""
    column: NDArray[np.float32] = getattr(batch, name)
    axis = COLUMNS[name].axis
    meant = {"token": batch.mask, "sequence": np.ones(batch.sequences, bool), "group": np.ones(batch.groups, bool)}[
        axis
    ]
    if len(column) != len(meant):
        raise InvalidInput(f"advantages need the column {name}, which the batch lacks", remedy=remedy, field=name)
    wrong = np.flatnonzero(meant & ~np.isfinite(column))
    if len(wrong):
        what, place = name.removesuffix("s"), int(wrong[0])
        raise InvalidInput(f"{axis} {place} has {what} {column[place]}", remedy=remedy, field=name)
    return column
