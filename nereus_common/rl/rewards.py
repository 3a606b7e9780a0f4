"""Rewards: plain functions of one finished sample, found by name or by import path.

    def reward(sample: RewardInput) -> float

A name is looked up in the entry point group `nereus.rewards` (see `extensions`). They run in worker processes, never
here: see `nereus_common.engines.rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus_common.rl.extensions import Extension

_REWARDS = Extension("reward", "nereus.rewards", "rewards.name")


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One sample. `position` is its prompt's place in the global order, `sample` its number within the group.

    `prompt` is the question's text, `response` the decoded answer without special tokens; the ids are those sampled.
    `finished` is False where the response was cut at the length limit.
    """

    position: int
    sample: int
    prompt: str
    response: str
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: tuple[int, ...] = ()
    finished: bool = True


Reward = Callable[[RewardInput], float]


def exact_answer(sample: RewardInput) -> float:
    """1 when the whole response is the answer, apart from surrounding space and one full stop; else 0."""
    response = sample.response.strip().removesuffix(".").rstrip()
    return float(response == sample.answer.strip())


def load_reward(name: str) -> Reward:
    """The function that `name` stands for; InvalidInput says what was looked for and what there is."""
    return _REWARDS.load(name)


def checked(value: object) -> float:
    """A reward's return value as a finite float; ValueError and TypeError say what it was instead."""
    if isinstance(value, bool | int | float):
        number = float(value)
        if math.isfinite(number):
            return number
        raise ValueError(f"returned {number}, which is not finite")
    raise TypeError(f"returned {value!r}, which is not a number")
