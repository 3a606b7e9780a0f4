"""Rollouts as columns: what generation produced, in the very tokens it sampled.

A batch holds `groups` prompts and `sequences` responses; the responses of one group are contiguous. Every array is
one column, so a batch crosses a wire as raw bytes and is cut without touching Python objects per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput

_DTYPES = {
    "prompt_tokens": np.int32,
    "prompt_offsets": np.int64,
    "position": np.int64,
    "group": np.int32,
    "response_tokens": np.int32,
    "response_offsets": np.int64,
    "logprobs": np.float32,
    "versions": np.int32,
    "mask": np.bool_,
    "finished": np.bool_,
    "rewards": np.float32,
    "advantages": np.float32,
    "proximal": np.float32,
    "reference": np.float32,
}
_OPTIONAL = frozenset({"proximal", "reference"})
"""Columns that a batch may do without; they are empty then."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """G groups, N sequences, P prompt tokens in all, R response tokens in all.

    prompt_tokens [P], prompt_offsets [G+1]: the prompt of group g is prompt_tokens[offsets[g]:offsets[g+1]].
    position [G]: the prompt's place in the global sample order.
    group [N]: the group of each sequence, non-decreasing.
    response_tokens [R], response_offsets [N+1]: as sampled, EOS included where one was sampled.
    logprobs [R]: the sampler's, after its sampling transforms. versions [R]: of the state that sampled each token.
    mask [R]: tokens that count in the loss. finished [N]: False where cut at the length limit.
    rewards [N]: NaN until scored. advantages [R]: NaN until computed.
    proximal [R]: log-probs under the policy that the ratio is taken to; empty: the policy before this update.
    reference [R]: log-probs under the reference model; empty where the job has none.
    """

    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    position: NDArray[np.int64]
    group: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    response_offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    mask: NDArray[np.bool_]
    finished: NDArray[np.bool_]
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    proximal: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    reference: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        groups, sequences = len(self.position), len(self.group)
        tokens = len(self.response_tokens)
        _check("prompt_offsets", len(self.prompt_offsets), groups + 1)
        _check("prompt_tokens", len(self.prompt_tokens), int(self.prompt_offsets[-1]))
        _check("response_offsets", len(self.response_offsets), sequences + 1)
        _check("response_tokens", tokens, int(self.response_offsets[-1]))
        for name in ("logprobs", "versions", "mask", "advantages"):
            _check(name, len(getattr(self, name)), tokens)
        for name in _OPTIONAL:
            if len(getattr(self, name)):
                _check(name, len(getattr(self, name)), tokens)
        for name in ("finished", "rewards"):
            _check(name, len(getattr(self, name)), sequences)
        if sequences and (np.diff(self.group) < 0).any():
            raise InvalidInput("rollouts: the sequences of a group are not contiguous", field="group")

    @property
    def groups(self) -> int:
        return len(self.position)

    @property
    def sequences(self) -> int:
        return len(self.group)

    @property
    def loss_tokens(self) -> int:
        """Unmasked response tokens: the denominator of a token mean."""
        return int(self.mask.sum())

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        return np.diff(self.response_offsets)

    def prompt(self, group: int) -> NDArray[np.int32]:
        return self.prompt_tokens[self.prompt_offsets[group] : self.prompt_offsets[group + 1]]

    def span(self, sequence: int) -> slice:
        """Where a sequence's tokens lie in the per-token columns."""
        return slice(int(self.response_offsets[sequence]), int(self.response_offsets[sequence + 1]))

    def response(self, sequence: int) -> NDArray[np.int32]:
        return self.response_tokens[self.span(sequence)]

    def select_groups(self, groups: Sequence[int]) -> RolloutBatch:
        """The named groups, whole, in the order given."""
        members = [np.flatnonzero(self.group == group) for group in groups]
        sequences = np.concatenate([*members, np.empty(0, np.int64)]).astype(np.int64)
        lengths = self.response_lengths[sequences]
        tokens = np.concatenate(
            [*(np.arange(self.response_offsets[s], self.response_offsets[s + 1]) for s in sequences), np.empty(0, int)]
        ).astype(np.int64)
        prompts = [self.prompt(group) for group in groups]
        return RolloutBatch(
            prompt_tokens=np.concatenate([*prompts, np.empty(0, np.int32)]).astype(np.int32),
            prompt_offsets=offsets([len(prompt) for prompt in prompts]),
            position=self.position[list(groups)],
            group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(member) for member in members]),
            response_tokens=self.response_tokens[tokens],
            response_offsets=offsets(lengths),
            logprobs=self.logprobs[tokens],
            versions=self.versions[tokens],
            mask=self.mask[tokens],
            finished=self.finished[sequences],
            rewards=self.rewards[sequences],
            advantages=self.advantages[tokens],
            **{name: _picked(getattr(self, name), tokens) for name in _OPTIONAL},
        )

    def with_columns(self, **columns: NDArray[Any]) -> RolloutBatch:
        return replace(self, **{name: np.asarray(value, _DTYPES[name]) for name, value in columns.items()})

    def columns(self) -> dict[str, NDArray[Any]]:
        return {column.name: getattr(self, column.name) for column in fields(self)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, NDArray[Any]]) -> Self:
        """The inverse of `columns`; InvalidInput names a column that is missing, unknown or of another dtype."""
        for name in _DTYPES.keys() | columns.keys():
            if name in _OPTIONAL and name not in columns:
                continue
            if name not in _DTYPES or name not in columns:
                state = "unknown" if name in columns else "missing"
                raise InvalidInput(f"rollout column {name} is {state}", field=name)
            if columns[name].dtype != _DTYPES[name]:
                raise InvalidInput(f"rollout column {name} is {columns[name].dtype}, not {_DTYPES[name].__name__}")
        return cls(**columns)


def offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] lengths → [n+1] offsets beginning at 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])


def _picked(column: NDArray[Any], tokens: NDArray[np.int64]) -> NDArray[Any]:
    """The named tokens of an optional column, which may be empty."""
    return column[tokens] if len(column) else column


def _check(column: str, found: int, expected: int) -> None:
    if found != expected:
        raise InvalidInput(f"rollout column {column} has {found} entries, not {expected}", field=column)
