"""Small rollout batches and the tokens of a loss, for tests of the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nereus_common.rl.policy_loss import TokenBatch
from nereus_common.rl.rollouts import COLUMNS, RolloutBatch, offsets
from nereus_common.rl.weights import Aggregation, loss_weights, minibatches_of


def make_batch(groups: Sequence[Sequence[float]], lengths: Sequence[int], **columns: Any) -> RolloutBatch:
    """Rewards by group and response lengths by sequence; other columns as given."""
    rewards = [reward for group in groups for reward in group]
    tokens = sum(lengths)
    batch = RolloutBatch(
        prompt_tokens=np.zeros(len(groups), np.int32),
        prompt_offsets=offsets([1] * len(groups)),
        position=np.arange(len(groups), dtype=np.int64),
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
        response_tokens=np.zeros(tokens, np.int32),
        response_offsets=offsets(lengths),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        mask=np.ones(tokens, np.bool_),
        finished=np.ones(len(rewards), np.bool_),
        rewards=np.array(rewards, np.float32),
        advantages=np.full(tokens, np.nan, np.float32),
    )
    return batch.with_columns(**columns)


def weighted(batch: RolloutBatch, aggregation: Aggregation, *, minibatches: int = 1, longest: int = 0) -> RolloutBatch:
    return batch.with_columns(weights=loss_weights(batch, minibatches, aggregation, longest=longest))


def tokens_of(
    batch: RolloutBatch,
    logprobs: Tensor,
    *,
    proximal: Tensor | None = None,
    sequences: Sequence[int] | None = None,
    weights: Tensor | None = None,
) -> TokenBatch:
    """What the trainer makes of a batch, or some of its `sequences`; `logprobs` and `proximal` are of all R tokens."""
    chosen = range(batch.sequences) if sequences is None else sequences
    places = torch.tensor(
        [place for one in chosen for place in range(*batch.span(one).indices(len(batch.mask)))]
    ).long()
    numbers = torch.tensor([number for number, one in enumerate(chosen) for _ in batch.response(one)]).long()

    def column(name: str) -> Tensor:
        values = torch.as_tensor(getattr(batch, name))[places]
        return values.to(logprobs.dtype) if COLUMNS[name].dtype is np.float32 else values

    return TokenBatch(
        logprobs=logprobs[places],
        entropy=torch.zeros(len(places), dtype=logprobs.dtype),
        weight=column("weights") if weights is None else weights[places],
        counted=column("mask"),
        fresh=column("mask"),
        sequence=numbers,
        advantages=column("advantages"),
        behaviour=column("logprobs"),
        proximal=None if proximal is None else proximal[places],
        reference=column("reference") if len(batch.reference) else None,
    )


def owners(batch: RolloutBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[R] the minibatch of each token."""
    return np.repeat(minibatches_of(batch)[batch.group], batch.response_lengths)
