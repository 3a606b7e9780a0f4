"""Between single completions and batches: gather groups, cut a batch over units."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch, offsets
from nereus_common.rl.weights import minibatches_of


@dataclass(frozen=True, slots=True)
class Completion:
    """One response: its very tokens, and per token the sampler's log-prob and the version that sampled it.

    `mask`: False on tokens that an environment wrote between the sampled ones; empty: all were sampled. `reward`:
    what an environment gave in all, NaN where there is none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool
    mask: tuple[bool, ...] = ()
    reward: float = math.nan

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidInput("a completion without tokens", field="token_ids")
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise InvalidInput(
                f"a completion has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions",
                field="logprobs",
            )
        if self.mask and len(self.mask) != len(self.token_ids):
            raise InvalidInput(
                f"a completion has {len(self.token_ids)} tokens and a mask of {len(self.mask)}", field="mask"
            )

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Per token, whether the model sampled it."""
        return self.mask or (True,) * len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """Of the sampled tokens: what a sample's staleness is counted by."""
        return min(version for version, sampled in zip(self.versions, self.sampled, strict=True) if sampled)


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to the prompt at `position` of the global sample order."""

    position: int
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]


def assemble(groups: Sequence[Group]) -> RolloutBatch:
    """Groups, whole and in order, as one batch; every sampled token counts.

    Advantages are NaN, and rewards too where no environment gave one.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    total = sum(lengths)
    return RolloutBatch(
        prompt_tokens=np.array([token for group in groups for token in group.prompt], np.int32),
        prompt_offsets=offsets([len(group.prompt) for group in groups]),
        position=np.array([group.position for group in groups], np.int64),
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.completions) for group in groups]),
        response_tokens=np.array([token for one in completions for token in one.token_ids], np.int32),
        response_offsets=offsets(lengths),
        logprobs=np.array([value for one in completions for value in one.logprobs], np.float32),
        versions=np.array([version for one in completions for version in one.versions], np.int32),
        mask=np.array([counts for one in completions for counts in one.sampled], np.bool_),
        finished=np.array([one.finished for one in completions], np.bool_),
        rewards=np.array([one.reward for one in completions], np.float32),
        advantages=np.full(total, np.nan, np.float32),
    )


def share_groups(batch: RolloutBatch, shares: int) -> tuple[tuple[int, ...], ...]:
    """Cut a batch over `shares` units by whole groups, so that the tokens of every minibatch are balanced.

    Within a minibatch the longest group goes first, to the unit with the fewest tokens of the minibatch, then of all.
    Every group is in exactly one share; a share lists its groups in batch order and may be empty.
    """
    tokens = np.diff(batch.prompt_offsets) + np.bincount(
        batch.group, weights=batch.response_lengths, minlength=batch.groups
    )
    minibatch = minibatches_of(batch)
    members: list[list[int]] = [[] for _ in range(shares)]
    total = [0.0] * shares
    for number in np.unique(minibatch):
        lightest = [(0.0, load, share) for share, load in enumerate(total)]
        heapq.heapify(lightest)
        for group in sorted(np.flatnonzero(minibatch == number).tolist(), key=lambda index: (-tokens[index], index)):
            load, _, share = heapq.heappop(lightest)
            members[share].append(group)
            total[share] += float(tokens[group])
            heapq.heappush(lightest, (load + float(tokens[group]), total[share], share))
    return tuple(tuple(sorted(share)) for share in members)
