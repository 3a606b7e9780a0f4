"""Environments that tests name by path."""

from __future__ import annotations

from nereus import Observation, Task


def two_digits(history: tuple[str, ...], task: Task) -> Observation:
    """Two responses, each worth 1/4 and more the larger its share of digits."""
    response = history[-1]
    share = sum(letter.isdigit() for letter in response) / max(1, len(response))
    return Observation("again", reward=(1 + share) / 4, done=len(history) > 1)
