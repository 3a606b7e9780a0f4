"""Rewards: plain functions of one finished sample, found by name or by import path.

    def reward(sample: RewardInput) -> float

A name is looked up in the entry point group `nereus.rewards`; `package.module:function` is imported, and so is
`path/to/file.py:function`. They run in worker processes, never here: see `nereus_common.engines.rewards`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_common.core.errors import InvalidInput

ENTRY_POINTS = "nereus.rewards"


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
    if ":" in name:
        return _import(name)
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise InvalidInput(
            f"there is no reward named {name!r}",
            remedy=f"installed: {', '.join(sorted(found)) or 'none'}; or write package.module:function",
            field="rewards.name",
        )
    return _import(found[name].value)


def _import(path: str) -> Reward:
    where, _, attribute = path.rpartition(":")
    try:
        module = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        function = getattr(module, attribute)
    except Exception as wrong:  # a user module may raise anything while it is imported
        raise InvalidInput(f"reward {path} cannot be imported: {wrong!r}", field="rewards.name") from wrong
    if not callable(function):
        raise InvalidInput(f"reward {path} is a {type(function).__name__}, not a function", field="rewards.name")
    reward: Reward = function
    return reward


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nereus_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checked(value: object) -> float:
    """A reward's return value as a finite float; ValueError and TypeError say what it was instead."""
    if isinstance(value, bool | int | float):
        number = float(value)
        if math.isfinite(number):
            return number
        raise ValueError(f"returned {number}, which is not finite")
    raise TypeError(f"returned {value!r}, which is not a number")


def weighted_sum(scores: Sequence[float], weights: Sequence[float]) -> float:
    """A sample's total reward."""
    return math.fsum(score * weight for score, weight in zip(scores, weights, strict=True))
