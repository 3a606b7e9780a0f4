"""The loss and its gradient do not depend on how the batch is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.losses import Grpo, TokenBatch, make_loss

pytestmark = pytest.mark.fast

TOKEN_LOSSES = [[1.0] * 2, [0.1] * 10, [0.5] * 4, [3.0]]
"""Four sequences; their token mean is 8/17, whatever the cut."""


def tokens_of(logprobs: Tensor, losses: Tensor, weight: Tensor | None = None, **more: Tensor) -> TokenBatch:
    """Tokens whose loss is `losses` while the ratio is one."""
    still = logprobs.detach()
    return TokenBatch(
        logprobs,
        torch.ones_like(losses) if weight is None else weight,
        -losses,
        still,
        torch.zeros_like(losses),
        **more,
    )


def loss_and_gradient(cuts: list[list[int]], *, masked: bool = False) -> tuple[float, Tensor]:
    """Token mean over the four sequences, computed microbatch by microbatch with a linear model."""
    torch.manual_seed(0)
    features = [torch.randn(len(losses), 3, dtype=torch.float64) for losses in TOKEN_LOSSES]
    model = torch.randn(3, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for cut in cuts:
        x = torch.cat([features[i] for i in cut] or [torch.zeros(0, 3, dtype=torch.float64)])
        losses = torch.tensor([loss for i in cut for loss in TOKEN_LOSSES[i]], dtype=torch.float64)
        weight = torch.ones_like(losses)
        if masked:
            x = torch.cat([x, torch.full((4, 3), 9.0, dtype=torch.float64)])
            losses = torch.cat([losses, torch.full((4,), float("nan"), dtype=torch.float64)])
            weight = torch.cat([weight, torch.zeros(4, dtype=torch.float64)])
        outcome = Grpo()(tokens_of(x @ model, losses, weight), 17)
        outcome.loss.backward()
        total += float(outcome.loss.detach())
    assert model.grad is not None
    return total, model.grad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "cuts",
    [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0], [], [2], [1]], [[], [0, 1, 2, 3]]],
)
def test_loss_and_gradient_are_the_same_for_every_cut(cuts: list[list[int]], masked: bool) -> None:
    reference, gradient = loss_and_gradient([[0, 1, 2, 3]])
    loss, found = loss_and_gradient(cuts, masked=masked)
    assert loss == pytest.approx(8 / 17, abs=1e-12) and reference == pytest.approx(8 / 17, abs=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)


def test_a_first_update_has_ratio_one_and_clips_nothing() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    outcome = Grpo()(tokens_of(logprobs, torch.tensor([1.0, -1.0])), 2)
    assert float(outcome.sums["clip_fraction"]) == 0
    outcome.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.5, -0.5]))


def test_a_token_outside_the_clip_range_gives_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    shift = torch.tensor([0.5, -0.5, 0.5, -0.5])
    batch = tokens_of(logprobs, torch.tensor([-1.0, -1.0, 1.0, 1.0]), proximal=logprobs.detach() - shift)
    outcome = Grpo(clip_low=0.2, clip_high=0.3)(batch, 4)
    outcome.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).tolist() == [True, False, False, True]
    assert float(outcome.sums["clip_fraction"]) == 2


def test_truncated_importance_weights_stop_at_the_cap() -> None:
    logprobs = torch.tensor([-1.0, -1.0])
    batch = TokenBatch(logprobs, torch.ones(2), torch.ones(2), torch.tensor([-1.5, -9.0]), torch.zeros(2))
    assert float(Grpo(tis_cap=2.0)(batch, 1).loss) == pytest.approx(-(math.exp(0.5) + 2.0))


def test_the_gap_is_the_mean_and_the_largest_distance_from_the_sampler() -> None:
    batch = TokenBatch(
        torch.tensor([-1.0, -2.0, -3.0]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.zeros(3),
        torch.tensor([-1.1, -2.3, float("nan")]),
        torch.zeros(3),
    )
    outcome = Grpo()(batch, 2)
    assert float(outcome.sums["logprob_gap"]) == pytest.approx(0.4)
    assert float(outcome.gap_max) == pytest.approx(0.3)


def test_the_reference_term_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    batch = tokens_of(logprobs, torch.zeros(1), reference=torch.tensor([-2.0]))
    outcome = Grpo(kl_beta=0.5)(batch, 1)
    outcome.loss.backward()
    assert float(outcome.loss.detach()) == pytest.approx(0.5 * (math.exp(-1) - 1 + 1))
    assert logprobs.grad is not None and float(logprobs.grad) > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "loss.name"),
        ({"name": "ppo"}, "loss.name"),
        ({"name": "grpo", "clip": 0.1}, "loss.clip"),
        ({"name": "grpo", "clip_low": "a lot"}, "loss.clip_low"),
        ({"name": "grpo", "clip_low": -1}, "loss.clip_low"),
        ({"name": "grpo", "tis_cap": 0}, "loss.tis_cap"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_loss(options)
    assert caught.value.details["field"] == field


def test_a_reference_term_without_reference_log_probs_is_refused() -> None:
    with pytest.raises(InvalidInput, match="reference log-probs"):
        Grpo(kl_beta=0.1)(tokens_of(torch.zeros(1), torch.zeros(1)), 1)
