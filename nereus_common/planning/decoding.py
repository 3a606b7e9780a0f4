"""How a generation unit decodes a batch: how many sequences run at once, for how long, and how much they look back on.

Sequences start in their order, as soon as one of the unit's slots is free, and all that run grow by a token in each
iteration (continuous batching). Between two ends nothing changes but the contexts, so thousands of iterations are a few
segments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Columns, one entry a segment: `active` sequences in each of its `iterations`, which between them look back on
    `context` positions in an iteration, on average."""

    active: Column
    iterations: Column
    context: Column

    @property
    def tokens(self) -> float:
        """Sampled in all."""
        return float((self.active * self.iterations).sum())

    @property
    def total_iterations(self) -> float:
        return float(self.iterations.sum())


def segments(lengths: Sequence[tuple[float, float]], slots: int) -> Segments:
    """Of (prompt, response) lengths in tokens, a response at least one long, on a unit with `slots` sequence slots."""
    if slots < 1:
        raise InvalidInput(f"a unit with {slots} slots decodes nothing", field="generation.max_sequences")
    if any(response < 1 or prompt < 0 for prompt, response in lengths):
        raise InvalidInput("a response has no token, or a prompt a negative number of them", field="lengths")
    waiting = list(reversed(lengths))
    ends: list[tuple[float, float]] = []
    """(iteration at which it is whole, prompt − iteration at which it started) of what runs."""
    found: list[tuple[float, float, float]] = []
    now = behind = 0.0  # `behind`: the sum of the second of `ends`
    while waiting or ends:
        while waiting and len(ends) < slots:
            prompt, response = waiting.pop()
            heapq.heappush(ends, (now + response, prompt - now))
            behind += prompt - now
        end = ends[0][0]
        middle = (now + end + 1) / 2  # iteration t of a sequence looks back on prompt + t positions, its own included
        found.append((len(ends), end - now, behind + len(ends) * middle))
        now = end
        while ends and ends[0][0] <= now:
            behind -= heapq.heappop(ends)[1]
    columns = np.array(found, np.float64).reshape(-1, 3)
    return Segments(columns[:, 0], columns[:, 1], columns[:, 2])
