"""Environments: what answers a model's response, in dialogues of several turns and with tools.

    class Environment:                                          def environment(history, task) -> Observation
        def reset(self, task: Task) -> None              or
        def step(self, response: str) -> Observation

A class is constructed once per episode, with the options of the job file. A plain function gets everything said so far
instead, so that it needs no state: `history` holds response, observation, response … and ends with the latest response.
A name is looked up in the entry point group `nereus.environments` (see `extensions`). They run in worker processes,
never here: see `nereus_common.engines.environments`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.extensions import Extension
from nereus_common.rl.rewards import checked

LONGEST_TEXT = 1 << 20
"""Characters of one observation; far beyond any context, and little enough to be held many times over."""

_ENVIRONMENTS = Extension("environment", "nereus.environments", "environment.name")


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is about. `position` is its prompt's place in the global order, `sample` its number within the
    group; `prompt` is the question's text."""

    position: int
    sample: int
    prompt: str
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one response. `text` becomes the next user message, unless the episode is `done`; an episode's
    reward is the sum over its turns."""

    text: str = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode."""

    def reset(self, task: Task) -> None: ...

    def step(self, response: str) -> Observation: ...


Answer = Callable[..., Observation]
"""(history, task, **options) → Observation."""


class FunctionEnvironment:
    """A function as an environment: it keeps what was said, so that the function need not.

    TypeError when the function does not take the history, the task and these options.
    """

    def __init__(self, answer: Answer, /, **options: Any) -> None:
        inspect.signature(answer).bind((), None, **options)
        self._answer = partial(answer, **options)
        self._history: list[str] = []

    def reset(self, task: Task) -> None:
        self._task = task
        self._history = []

    def step(self, response: str) -> Observation:
        self._history.append(response)
        observation = self._answer(tuple(self._history), self._task)
        if isinstance(observation, Observation):
            self._history.append(observation.text)
        return observation


def load_environment(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """What makes an episode of the environment that `name` stands for.

    One is made here and dropped, so that options it does not take are InvalidInput before any episode.
    """
    found = _ENVIRONMENTS.load(name)
    if inspect.isclass(found):
        _check_methods(name, found)
        make: Callable[..., Any] = found
    else:
        make = partial(FunctionEnvironment, found)
    try:
        make(**options)
    except InvalidInput:
        raise
    except Exception as wrong:  # a user's constructor may raise anything
        raise InvalidInput(
            f"environment {name} does not take its options: {wrong!r}",
            remedy="see what its constructor, or the function after (history, task), takes",
            field="environment.options",
        ) from wrong
    return partial(make, **options)


def checked_observation(value: object) -> Observation:
    """What a step returned, as plain values; TypeError and ValueError say what it was instead."""
    if not isinstance(value, Observation):
        raise TypeError(f"returned {type(value).__name__}, which is no Observation")
    if not isinstance(value.text, str) or not isinstance(value.done, bool):
        raise TypeError(f"returned an Observation of text {type(value.text).__name__} and done {value.done!r}")
    if len(value.text) > LONGEST_TEXT:
        raise ValueError(f"returned {len(value.text)} characters, above the limit of {LONGEST_TEXT}")
    value.text.encode()  # half a surrogate pair is no text that could be tokenised
    return Observation(str(value.text), checked(value.reward), value.done)


def _check_methods(name: str, environment: type) -> None:
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise InvalidInput(
                f"environment {name} has no method {method}",
                remedy="an environment is a class with reset(task) and step(response), or a function",
                field="environment.name",
            )
