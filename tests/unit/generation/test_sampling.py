from __future__ import annotations

import pytest
import torch

from nereus_common.engines.generation.base import Sampling
from nereus_common.engines.generation.sampling import sample, transform

pytestmark = pytest.mark.fast
LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_temperature_divides_logits_not_logprobs() -> None:
    expected = torch.tensor([[-0.20806, -1.874727, -3.541394, -5.20806]])
    torch.testing.assert_close(transform(LOGITS, Sampling(1, temperature=0.6)), expected, atol=1e-5, rtol=0)


def test_top_p_renormalises_over_the_tokens_it_keeps() -> None:
    shown = transform(LOGITS, Sampling(1, top_p=0.8))
    kept = LOGITS.log_softmax(-1)[0, :2] - torch.log(torch.tensor(0.880797))
    torch.testing.assert_close(shown[0, :2], kept, atol=1e-5, rtol=0)
    assert torch.isneginf(shown[0, 2:]).all()


def test_top_k_keeps_k_tokens() -> None:
    shown = transform(LOGITS, Sampling(1, top_k=3))
    assert torch.isfinite(shown).sum() == 3
    torch.testing.assert_close(shown.exp().sum(), torch.tensor(1.0))


def test_temperature_zero_takes_the_likeliest_token_with_its_plain_logprob() -> None:
    tokens, logprobs = sample(LOGITS, Sampling(1, temperature=0.0), torch.Generator())
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[:, 0])


def test_tokens_come_as_often_as_their_logprobs_say() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, logprobs = sample(LOGITS.repeat(20000, 1), Sampling(1, temperature=0.6), generator)
    share = (tokens == 0).double().mean()
    torch.testing.assert_close(share, logprobs[tokens == 0][0].exp().double(), atol=0.01, rtol=0)
