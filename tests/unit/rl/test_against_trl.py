"""Losses, gradients and advantages equal TRL's on the same float32 tensors, to 1e-6.

GRPO and RLOO run TRL 1.16's own trainers on given log-probs (`trl_trainers`), PPO what its last release with PPO
computed (`trl_ppo/record.py`). The correspondence, and where this project chose otherwise:

- Aggregation: TRL's `grpo` is `sequence`, `bnpo` and `dapo` are `token`, `dr_grpo` is `constant`. TRL's `grpo` also
  counts sequences without any unmasked token in its mean; here they have no share at all.
- The group's standard deviation is the population's here, the sample's in TRL: a constant factor per group size.
- TRL's `delta` is `dual_clip`. Its importance weights towards the sampler, `token_truncate`, are `tis_cap`.
- TRL differentiates k3 as it stands: `kl_gradient="plain"`. The default here, `corrected`, has KL's own gradient.
- TRL's RLOO takes a whole response as one action and clips its ratio: `ratio="trajectory"`, aggregation `sequence`.
- TRL's PPO puts the score, and one more value, one position behind a response that ended by itself, on a token that
  nobody sampled; here the score is on the last sampled token. Both are the same where nothing ended early, and this
  project's GAE over responses one token longer is TRL's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nereus_common.rl.advantages import estimate
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.trajectories import whitened
from nereus_common.rl.value_loss import ValueBatch, ValueLoss
from nereus_common.rl.weights import Aggregation
from tests.unit.rl.batches import make_batch, tokens_of, weighted
from tests.unit.rl.trl_trainers import Given, Settings, grpo, rloo

AGGREGATIONS: dict[str, Aggregation] = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}
RECORDED = json.loads(Path(__file__).with_name("trl_ppo").joinpath("recorded.json").read_text())


@pytest.fixture(scope="module")
def trl() -> Iterator[None]:
    """TRL imports vLLM where it is installed, which takes long; nothing here needs it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import import_utils

        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        import trl.trainer.grpo_trainer
        import trl.trainer.rloo_trainer  # noqa: F401
        from accelerate import Accelerator

        Accelerator(cpu=True)
        yield


def batch_of(given: Given, *, behaviour: str, tools: bool = True) -> RolloutBatch:
    mask = given.flat("tool_mask").numpy().astype(bool) if tools else np.ones(sum(given.lengths), bool)
    return make_batch(
        given.rewards.reshape(-1, given.group).tolist(),
        given.lengths,
        mask=mask,
        logprobs=given.flat(behaviour).numpy(),
        reference=given.flat("reference").numpy(),
    )


def loss_and_gradient(
    loss: PolicyLoss, batch: RolloutBatch, given: Given, *, first: bool = False
) -> tuple[Tensor, Tensor]:
    """Ours, the gradient as [B, T]."""
    leaf = given.current.clone().requires_grad_()
    proximal = None if first else given.flat("old")
    found = loss(tokens_of(batch, leaf[given.real], proximal=proximal)).loss
    found.backward()
    assert leaf.grad is not None
    return found.detach(), leaf.grad


def agree(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-6, atol=1e-6, check_dtype=False)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clip-higher": ({"epsilon": 0.1, "epsilon_high": 0.3}, {"clip_low": 0.1, "clip_high": 0.3}),
    "dual clip": ({"delta": 1.3}, {"dual_clip": 1.3}),
    "k3 in the loss": ({"beta": 0.3}, {"kl_beta": 0.3, "kl_estimator": "k3", "kl_gradient": "plain"}),
    "truncated importance weights": ({"cap": 1.1}, {"tis_cap": 1.1}),
    "all at once": (
        {"epsilon_high": 0.25, "delta": 1.4, "beta": 0.1, "cap": 1.2},
        {"clip_high": 0.25, "dual_clip": 1.4, "kl_beta": 0.1, "kl_gradient": "plain", "tis_cap": 1.2},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_grpo_after_an_update_is_that_of_trl(trl: None, loss_type: str, level: str, variant: str) -> None:
    theirs, ours = VARIANTS[variant]
    for seed in range(3):
        given = Given.random(seed)
        _, loss, gradient = grpo(given, Settings(loss_type=loss_type, level=level, **theirs))
        batch = estimate(batch_of(given, behaviour="sampler"), {"name": "group", "scale_by_std": False})
        batch = weighted(batch, AGGREGATIONS[loss_type], longest=7)
        found = loss_and_gradient(PolicyLoss(ratio=level, **ours), batch, given)  # type: ignore[arg-type]
        agree(found[0], loss)
        agree(found[1], gradient)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_grpo_at_the_first_update_is_that_of_trl(trl: None, loss_type: str) -> None:
    given = Given.random(5)
    _, loss, gradient = grpo(given, Settings(loss_type=loss_type, first_update=True))
    batch = estimate(batch_of(given, behaviour="old"), {"name": "group", "scale_by_std": False})
    found = loss_and_gradient(PolicyLoss(), weighted(batch, AGGREGATIONS[loss_type], longest=7), given, first=True)
    agree(found[0], loss)
    agree(found[1], gradient)


@pytest.mark.parametrize("size", [2, 4])
def test_group_advantages_are_those_of_trl_up_to_the_choice_of_deviation(trl: None, size: int) -> None:
    given = Given.random(1, groups=3, group=size)
    theirs = grpo(given, Settings(scale_rewards="group"))[0]["advantages"].numpy().astype(float)
    rewards = given.rewards.numpy().astype(float).reshape(-1, size)
    sample, population = (np.repeat(rewards.std(1, ddof=ddof), size) + 1e-4 for ddof in (1, 0))
    batch = estimate(batch_of(given, behaviour="old", tools=False), {"name": "group"})
    agree(batch.advantages[batch.response_offsets[:-1]] * population, theirs * sample)


def test_a_fully_masked_sequence_has_no_share_though_it_counts_in_the_mean_of_trl(trl: None) -> None:
    given = Given.random(2)
    given.tool_mask[4:7] = 0
    _, loss, gradient = grpo(given, Settings(loss_type="grpo"))
    batch = estimate(batch_of(given, behaviour="old"), {"name": "group", "scale_by_std": False})
    found = loss_and_gradient(PolicyLoss(), weighted(batch, "sequence"), given)
    agree(found[0] * 9 / 12, loss)
    agree(found[1] * 9 / 12, gradient)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_is_that_of_trl_in_advantages_loss_and_gradient(trl: None, beta: float) -> None:
    for seed in range(3):
        given = Given.random(seed)
        inputs, loss, gradient = rloo(given, Settings(beta=beta, epsilon_high=0.3))
        batch = batch_of(given, behaviour="old", tools=False)
        batch = estimate(batch, {"name": "leave-one-out", "kl_beta": beta, "kl_estimator": "k1"})
        agree(batch.advantages[batch.response_offsets[:-1]], inputs["advantages"])
        policy = PolicyLoss(ratio="trajectory", clip_high=0.3)
        found = loss_and_gradient(policy, weighted(batch, "sequence"), given)
        agree(found[0], loss)
        agree(found[1], gradient)


def ppo_batch(case: dict[str, Any], *, behind: int) -> tuple[RolloutBatch, Tensor]:
    """A recorded rollout batch, and [B, T] which of its places are tokens; `behind`: places after an early end that
    TRL takes for tokens too."""
    padded = torch.tensor(case["padding_mask"])
    lengths = ((~padded).sum(1) + behind).clamp(max=padded.shape[1])
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    columns = {"logprobs": "logprobs", "reference": "ref_logprobs", "values": "values"}
    return (
        make_batch(
            [[score] for score in case["scores"]],
            lengths.tolist(),
            **{ours: torch.tensor(case[theirs])[real].numpy() for ours, theirs in columns.items()},
        ),
        real,
    )


def gae_options(case: dict[str, Any], *, whiten: bool) -> dict[str, Any]:
    settings = RECORDED["settings"]
    kl = {"kl_beta": settings["kl_coef"], "kl_estimator": case["options"]["kl_estimator"]}
    return {"name": "gae", "gamma": settings["gamma"], "lam": settings["lam"], "whiten": whiten, **kl}


@pytest.mark.parametrize("name", ["whole length, k1", "whole length, k3"])
def test_ppo_advantages_and_returns_are_those_of_trl(name: str) -> None:
    case = RECORDED["cases"][name]
    batch, real = ppo_batch(case, behind=0)
    assert real.all()
    batch = estimate(batch, gae_options(case, whiten=True))
    agree(batch.advantages, torch.tensor(case["advantages"]).flatten())
    agree(batch.returns, torch.tensor(case["returns"]).flatten())


def test_where_responses_end_early_trl_takes_one_more_place_for_a_token() -> None:
    case = RECORDED["cases"]["some end early"]
    batch, real = ppo_batch(case, behind=1)
    batch = estimate(batch, gae_options(case, whiten=False))
    agree(batch.returns, torch.tensor(case["returns"])[real])
    padded = torch.tensor(case["padding_mask"])
    assert padded.any()
    sampled = ~padded[real].numpy()
    agree(
        whitened(batch.advantages[sampled].astype(float)),
        torch.tensor(case["advantages"])[~padded],
    )


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_ppo_losses_and_gradients_are_those_of_trl_at_every_update(name: str) -> None:
    case, settings = RECORDED["cases"][name], RECORDED["settings"]
    for update in case["updates"]:
        chosen = update["sequences"]
        rows = {key: torch.tensor(case[key])[chosen] for key in ("logprobs", "advantages", "returns", "values")}
        batch, real = ppo_batch(case, behind=0)
        batch, real = weighted(batch.select_groups(chosen), "token"), real[chosen]
        batch = batch.with_columns(advantages=rows["advantages"][real].numpy())
        leaf = torch.tensor(update["logprobs"], requires_grad=True)
        policy = PolicyLoss(clip_low=settings["cliprange"], clip_high=settings["cliprange"])
        policy_loss = policy(tokens_of(batch, leaf[real], proximal=rows["logprobs"][real])).loss
        agree(policy_loss.detach(), update["policy_loss"])
        agree(torch.autograd.grad(policy_loss, leaf)[0], torch.tensor(update["policy_gradient"]))

        batch, real = ppo_batch(case, behind=1)
        batch, real = weighted(batch.select_groups(chosen), "token"), real[chosen]
        leaf = torch.tensor(update["values"], requires_grad=True)
        counted = torch.as_tensor(batch.mask)
        value_batch = ValueBatch(
            leaf[real], torch.as_tensor(batch.weights), counted, rows["values"][real], rows["returns"][real]
        )
        value_loss = ValueLoss(clip=settings["cliprange_value"])(value_batch).loss
        agree(value_loss.detach(), update["value_loss"])
        agree(torch.autograd.grad(value_loss, leaf)[0], torch.tensor(update["value_gradient"]))
