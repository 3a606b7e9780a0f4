"""What a pass goes over, as far as its cost depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from nereus_common.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sums over the sequences of a pass; real numbers, because a planner knows them as averages.

    `rows`: their tokens. `pairs`: the (query, key) pairs of causal attention, n(n + 1) / 2 for n tokens. `predicted`:
    the rows that go through the head.
    """

    rows: float
    pairs: float
    predicted: float

    def __post_init__(self) -> None:
        for name in ("rows", "pairs", "predicted"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidInput(
                    f"{name} of a pass are {value!r}", remedy="a number that is not negative", field=name
                )

    @classmethod
    def of(cls, sequences: Iterable[tuple[float, float]]) -> Self:
        """Of (prompt, response) lengths in tokens: every response token is predicted by the row before it."""
        lengths = list(sequences)
        totals = [prompt + response for prompt, response in lengths]
        return cls(sum(totals), sum(n * (n + 1) / 2 for n in totals), sum(response for _, response in lengths))

    def share(self, parts: float) -> Tokens:
        """One of `parts` equal parts."""
        return Tokens(self.rows / parts, self.pairs / parts, self.predicted / parts)
