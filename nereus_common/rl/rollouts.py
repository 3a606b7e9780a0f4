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


@dataclass(frozen=True, slots=True)
class Column:
    """`axis`: one entry per prompt token, group, sequence or (response) token; offsets have one more than that.

    An optional column may be empty.
    """

    dtype: type[np.generic]
    axis: str
    optional: bool = False


COLUMNS: Mapping[str, Column] = {
    "prompt_tokens": Column(np.int32, "prompt token"),
    "prompt_offsets": Column(np.int64, "group offset"),
    "position": Column(np.int64, "group"),
    "group": Column(np.int32, "sequence"),
    "response_tokens": Column(np.int32, "token"),
    "response_offsets": Column(np.int64, "sequence offset"),
    "logprobs": Column(np.float32, "token"),
    "versions": Column(np.int32, "token"),
    "mask": Column(np.bool_, "token"),
    "finished": Column(np.bool_, "sequence"),
    "rewards": Column(np.float32, "sequence"),
    "advantages": Column(np.float32, "token"),
    "weights": Column(np.float32, "token", optional=True),
    "reference": Column(np.float32, "token", optional=True),
    "values": Column(np.float32, "token", optional=True),
    "returns": Column(np.float32, "token", optional=True),
    "baseline": Column(np.float32, "group", optional=True),
    "minibatch": Column(np.int32, "group", optional=True),
}
_OPTIONAL = tuple(name for name, column in COLUMNS.items() if column.optional)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """G groups, N sequences, P prompt tokens in all, R response tokens in all.

    prompt_tokens [P], prompt_offsets [G+1]: the prompt of group g is prompt_tokens[offsets[g]:offsets[g+1]].
    position [G]: the prompt's place in the global sample order.
    group [N]: the group of each sequence, non-decreasing.
    response_tokens [R], response_offsets [N+1]: as sampled, EOS included where one was sampled; in a dialogue the
    environment's tokens stand between them.
    logprobs [R]: the sampler's, after its sampling transforms. versions [R]: of the state that sampled each token.
    mask [R]: tokens that were sampled and count in the loss; log-prob and version mean nothing elsewhere.
    finished [N]: False where cut at the length limit.
    rewards [N]: NaN until scored. advantages [R]: NaN until computed.

    The rest is empty where an algorithm has no use for it. weights [R]: the share of each token in the loss of its
    minibatch, 0 where masked (`rl.weights`). reference [R]: log-probs under the reference model. values, returns [R]:
    the critic's values before each token, and what they should have been. baseline [G]: reward of the greedy response.
    minibatch [G]: which update of an epoch consumes the group.
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
    weights: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    reference: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    returns: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    baseline: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    minibatch: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        sizes = {
            "prompt token": int(self.prompt_offsets[-1]),
            "group": self.groups,
            "group offset": self.groups + 1,
            "sequence": self.sequences,
            "sequence offset": self.sequences + 1,
            "token": int(self.response_offsets[-1]),
        }
        for name, column in COLUMNS.items():
            found = len(getattr(self, name))
            if found != sizes[column.axis] and not (column.optional and not found):
                raise InvalidInput(
                    f"rollout column {name} has {found} entries, not {sizes[column.axis]}: one per {column.axis}",
                    field=name,
                )
        if self.sequences and (np.diff(self.group) < 0).any():
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
        picked = {"group": np.asarray(groups, np.int64), "sequence": sequences, "token": tokens}
        columns: dict[str, NDArray[Any]] = {
            name: column[picked[COLUMNS[name].axis]] if len(column) else column
            for name, column in self.columns().items()
            if COLUMNS[name].axis in picked
        }
        return RolloutBatch(
            **{
                **columns,
                "prompt_tokens": np.concatenate([*prompts, np.empty(0, np.int32)]).astype(np.int32),
                "prompt_offsets": offsets([len(prompt) for prompt in prompts]),
                "group": np.repeat(np.arange(len(groups), dtype=np.int32), [len(member) for member in members]),
                "response_offsets": offsets(lengths),
            }
        )

    def with_columns(self, **columns: NDArray[Any]) -> RolloutBatch:
        return replace(self, **{name: np.asarray(value, COLUMNS[name].dtype) for name, value in columns.items()})

    def columns(self) -> dict[str, NDArray[Any]]:
        return {column.name: getattr(self, column.name) for column in fields(self)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, NDArray[Any]]) -> Self:
        """The inverse of `columns`; InvalidInput names a column that is missing, unknown or of another dtype."""
        for name in COLUMNS.keys() | columns.keys():
            if name in _OPTIONAL and name not in columns:
                continue
            if name not in COLUMNS or name not in columns:
                state = "unknown" if name in columns else "missing"
                raise InvalidInput(f"rollout column {name} is {state}", field=name)
            if columns[name].dtype != COLUMNS[name].dtype:
                wanted = COLUMNS[name].dtype.__name__
                raise InvalidInput(f"rollout column {name} is {columns[name].dtype}, not {wanted}", field=name)
        return cls(**columns)


def offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] lengths → [n+1] offsets beginning at 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])
