"""The algorithms: what each computes from rewards, and what it tells the training engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from nereus.spec.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class KlSpec(Section):
    """The penalty for leaving the reference model, whose weight is `beta`; 0 leaves that model out.

    `placement`: `loss` adds it to the policy's loss, `reward` takes it off every token's reward. `estimator`: k1, k2
    or k3 (Schulman 2020). `gradient`, for the loss: `corrected` has the expectation of KL's own gradient whatever the
    estimator; `plain` differentiates the estimate as it stands (what the GRPO paper writes for k3).
    """

    beta: NonNegativeFloat = 0.0
    placement: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    gradient: Literal["corrected", "plain"] = "corrected"


class RewardKlSpec(KlSpec):
    """The same, taken off the reward unless it is placed elsewhere."""

    placement: Literal["loss", "reward"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"


class OverlongSpec(Section):
    """Soft punishment of long responses (DAPO; Yu et al. 2025, arXiv 2503.14476, eq. 13).

    From `length` - `buffer` tokens on the reward falls in a straight line, by `penalty` at `length` tokens and beyond.
    """

    length: PositiveInt
    buffer: PositiveInt
    penalty: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.length:
            raise ValueError(f"overlong.buffer {self.buffer} is longer than overlong.length {self.length}")
        return self


class PolicySpec(Section):
    """What all algorithms share: the batch, and the clipped policy loss (Schulman et al. 2017, arXiv 1707.06347).

    A step takes `groups_per_step` prompts, each answered `samples_per_group` times, and makes `minibatches` updates of
    equally many groups, `epochs` times over. The ratio to the policy before the step is clipped to
    [1 - clip_low, 1 + clip_high]; unequal bounds are DAPO's clip-higher. `dual_clip` > 1 also bounds the loss of
    tokens with a negative advantage (Ye et al. 2020, arXiv 1912.09729). `ratio`: per token, the geometric mean over
    the sequence (GSPO; Zheng et al. 2025, arXiv 2507.18071), or the product over it (`trajectory`: one response, one
    action, as in RLOO). `aggregation`: mean over all tokens of the minibatch,
    mean over sequences of their token means, or the sum over tokens by a constant, sequences × max_tokens
    (Dr. GRPO; Liu et al. 2025, arXiv 2503.20783). `tis_cap`: truncated importance sampling, a weight of
    min(trainer / sampler, cap) per token; None weighs all alike. `mask_truncated` leaves responses that were cut at
    the length limit out of the loss.
    """

    groups_per_step: PositiveInt = 16
    samples_per_group: PositiveInt = 8
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    ratio: Literal["token", "sequence", "trajectory"] = "token"
    aggregation: Literal["token", "sequence", "constant"] = "token"
    tis_cap: PositiveFloat | None = None
    kl: KlSpec = KlSpec()
    overlong: OverlongSpec | None = None
    mask_truncated: bool = False

    @model_validator(mode="after")
    def _minibatches_hold_a_group(self) -> Self:
        if self.minibatches > self.groups_per_step:
            raise ValueError(f"{self.minibatches} minibatches cannot be cut from {self.groups_per_step} groups")
        return self

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_baseline(self) -> bool:
        return False

    def loss_options(self) -> dict[str, Any]:
        """What the training engine is told about the policy's loss."""
        options = self.model_dump(include={"clip_low", "clip_high", "dual_clip", "ratio", "tis_cap"})
        in_loss = self.kl.placement == "loss"
        kl = {
            "kl_beta": self.kl.beta if in_loss else 0.0,
            "kl_estimator": self.kl.estimator,
            "kl_gradient": self.kl.gradient,
        }
        return {"name": "policy", **options, **kl}

    def estimator_options(self) -> dict[str, Any]:
        """What `rl.advantages` is told; algorithms add their own."""
        in_reward = self.kl.placement == "reward"
        return {"kl_beta": self.kl.beta if in_reward else 0.0, "kl_estimator": self.kl.estimator}


class GrpoSpec(PolicySpec):
    """GRPO (Shao et al. 2024, arXiv 2402.03300).

    The advantage is the reward less the group's mean, divided by the group's standard deviation where
    `normalise_std`. `equal_groups`: what becomes of groups whose rewards, before long responses are punished, are all
    equal: `keep` them, `drop` them from the batch, or `replace` them by the next prompts' groups (DAPO's dynamic
    sampling; rewards of models come too late for it).
    """

    name: Literal["grpo"] = "grpo"
    samples_per_group: Annotated[int, Field(ge=2)] = 8
    normalise_std: bool = True
    equal_groups: Literal["keep", "drop", "replace"] = "keep"

    def estimator_options(self) -> dict[str, Any]:
        return {"name": "group", "scale_by_std": self.normalise_std, **super().estimator_options()}


class RlooSpec(PolicySpec):
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline is the mean reward of the group's other samples."""

    name: Literal["rloo"] = "rloo"
    samples_per_group: Annotated[int, Field(ge=2)] = 8
    kl: RewardKlSpec = RewardKlSpec()

    def estimator_options(self) -> dict[str, Any]:
        return {"name": "leave-one-out", **super().estimator_options()}


class RemaxSpec(PolicySpec):
    """ReMax (Li et al. 2023, arXiv 2310.10505): the baseline is the reward of the greedy response to the prompt."""

    name: Literal["remax"] = "remax"
    samples_per_group: PositiveInt = 1
    kl: RewardKlSpec = RewardKlSpec()

    @property
    def needs_baseline(self) -> bool:
        return True

    def estimator_options(self) -> dict[str, Any]:
        return {"name": "greedy", **super().estimator_options()}


class ReinforceSpec(PolicySpec):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): rewards to go, normalised over the global batch.

    With `group_mean` the group's mean reward is taken off first (the paper's variant with a baseline).
    """

    name: Literal["reinforce++"] = "reinforce++"
    samples_per_group: PositiveInt = 1
    gamma: Fraction = 1.0
    group_mean: bool = False
    kl: RewardKlSpec = RewardKlSpec()

    def estimator_options(self) -> dict[str, Any]:
        own = {"gamma": self.gamma, "group_mean": self.group_mean}
        return {"name": "to-go", **own, **super().estimator_options()}


class PpoSpec(PolicySpec):
    """PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic and GAE (Schulman et al. 2015, arXiv 1506.02438).

    `gamma` discounts, `gae_lambda` trades bias for variance; `whiten` normalises the advantages over the global batch.
    `value_clip` bounds how far a value may move from that before the step, None does not.
    """

    name: Literal["ppo"] = "ppo"
    samples_per_group: PositiveInt = 1
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten: bool = True
    value_clip: PositiveFloat | None = 0.2
    kl: RewardKlSpec = RewardKlSpec()

    @property
    def needs_critic(self) -> bool:
        return True

    def estimator_options(self) -> dict[str, Any]:
        own = {"gamma": self.gamma, "lam": self.gae_lambda, "whiten": self.whiten}
        return {"name": "gae", **own, **super().estimator_options()}

    def value_loss_options(self) -> dict[str, Any]:
        """What the critic's training engine is told."""
        return {"name": "value", "clip": self.value_clip}


Algorithm = Annotated[GrpoSpec | PpoSpec | RemaxSpec | RlooSpec | ReinforceSpec, Field(discriminator="name")]
