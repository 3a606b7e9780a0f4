"""Gathers an engine's deltas into pieces of the length a caller asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nereus_common.core.errors import NereusError
from nereus_common.engines.generation.base import Delta, Finish, Piece


@dataclass
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Pieces:
    """`interval` tokens per piece; 0: each sample whole. The last piece of a sample is the one with a finish."""

    def __init__(self, version: int, interval: int) -> None:
        self._version = version
        self._interval = interval
        self._growing: dict[int, _Sample] = {}

    def add(self, delta: Delta) -> Iterator[Piece]:
        if len(delta.token_ids) != len(delta.logprobs):
            raise NereusError(
                f"the engine gave {len(delta.token_ids)} tokens with {len(delta.logprobs)} log-probs",
                sample=delta.sample,
            )
        sample = self._growing.setdefault(delta.sample, _Sample())
        sample.tokens.extend(delta.token_ids)
        sample.logprobs.extend(delta.logprobs)
        while self._interval and len(sample.tokens) > self._interval:
            yield self._cut(delta.sample, sample, self._interval, None)
        if delta.finish is not None:
            yield self._cut(delta.sample, self._growing.pop(delta.sample), len(sample.tokens), delta.finish)
        elif self._interval and len(sample.tokens) == self._interval:
            yield self._cut(delta.sample, sample, self._interval, None)

    def rest(self) -> Iterator[Piece]:
        """The tokens not yet given out, of samples that will go on elsewhere."""
        for index, sample in self._growing.items():
            if sample.tokens:
                yield self._cut(index, sample, len(sample.tokens), None)

    def _cut(self, index: int, sample: _Sample, count: int, finish: Finish | None) -> Piece:
        piece = Piece(index, tuple(sample.tokens[:count]), tuple(sample.logprobs[:count]), self._version, finish)
        del sample.tokens[:count], sample.logprobs[:count]
        return piece
