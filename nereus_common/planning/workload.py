"""What a step of a job consists of, as far as its cost depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nereus_common.core.errors import InvalidInput
from nereus_common.planning.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """`groups` of `samples` responses to one prompt of `prompt` tokens, on average.

    `responses`: lengths in tokens, each of as many of the responses: quantiles, or simply all that were seen. A step
    makes `minibatches` × `epochs` updates.
    """

    groups: int
    samples: int
    prompt: float
    responses: tuple[float, ...]
    minibatches: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("groups", "samples", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} of a step is {getattr(self, name)}", remedy="at least 1", field=name)
        if not (math.isfinite(self.prompt) and self.prompt >= 1):
            raise InvalidInput(f"a prompt of {self.prompt!r} tokens", remedy="at least 1", field="prompt")
        if not self.responses or not all(math.isfinite(length) and length >= 1 for length in self.responses):
            raise InvalidInput(
                "response lengths are missing or below 1", remedy="measure them first", field="responses"
            )

    @property
    def sequences(self) -> int:
        return self.groups * self.samples

    @property
    def response(self) -> float:
        """Tokens of a response, on average."""
        return sum(self.responses) / len(self.responses)

    def packed(self) -> Tokens:
        """The rows that training and inference compute: a group's prompt once, and no row for the last token of a
        response, which predicts nothing. A response sees its prompt and itself."""
        prompt = self.prompt * (self.prompt + 1) / 2
        branches = [(length - 1) * self.prompt + (length - 1) * length / 2 for length in self.responses]
        return Tokens(
            rows=self.groups * self.prompt + self.sequences * (self.response - 1),
            pairs=self.groups * prompt + self.sequences * sum(branches) / len(branches),
            predicted=self.sequences * self.response,
        )

    def lengths(self, groups: int) -> list[tuple[float, float]]:
        """(prompt, response) of each sequence of so many groups, the response lengths in turn."""
        count = groups * self.samples
        return [(self.prompt, self.responses[number % len(self.responses)]) for number in range(count)]
