"""The head computes log-probs as the sampler does, and their exact gradient."""

from __future__ import annotations

import pytest
import torch

from nereus_common.engines.torch_model.head import token_logprobs

pytestmark = pytest.mark.fast


def test_temperature_divides_logits_not_log_probs() -> None:
    hidden, weight = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 4), torch.eye(4)
    found, _ = token_logprobs(hidden, weight, torch.arange(4), 0.6)
    expected = torch.tensor([-0.20806, -1.874727, -3.541394, -5.20806])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_log_probs_entropies_and_gradients_equal_autograd() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, upstream = torch.randint(0, 11, (7,)), torch.randn(7, dtype=torch.float64)
    found, entropy = token_logprobs(hidden, weight, targets, 0.7)
    found.backward(upstream)
    gradients = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    reference = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    reference.gather(1, targets[:, None])[:, 0].backward(upstream)
    torch.testing.assert_close(found, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad))


def test_bfloat16_inputs_give_float32_logits() -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(8, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    targets = torch.randint(0, 500, (8,))
    found, _ = token_logprobs(hidden, weight, targets, 1.0)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_no_predictions_are_no_error() -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    found, _ = token_logprobs(hidden, torch.randn(6, 4), torch.zeros(0, dtype=torch.int64), 1.0)
    found.sum().backward()
    assert found.shape == (0,)
