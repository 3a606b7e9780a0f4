"""Sampling transforms in the order vLLM applies them: temperature, top-k, top-p; log-probs of what is left."""

from __future__ import annotations

import torch

from nereus_common.engines.generation.base import Sampling


def transform(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs [rows, vocabulary] of the distribution that is sampled, from float32 `logits` of that shape.

    Tokens outside top-k or top-p have -inf; at temperature 0 nothing is transformed.
    """
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = scaled.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = (before >= sampling.top_p).scatter(-1, index, before >= sampling.top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled.log_softmax(-1)


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-prob, both [rows]."""
    logprobs = transform(logits.float(), sampling)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
