"""A worker body that holds many episodes of one environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nereus_common.engines.strangers import limit_memory, out_of_memory
from nereus_common.rl.environments import Environment, Observation, Task, checked_observation, load_environment


@dataclass(frozen=True, slots=True)
class EnvironmentBodyConfig:
    name: str
    options: Mapping[str, Any]
    memory_bytes: int


class EnvironmentBody:
    """Episodes by number. InvalidInput when the environment cannot be found or does not take its options.

    `over`, in any call, names episodes that nobody will ask for again.
    """

    def __init__(self, config: EnvironmentBodyConfig) -> None:
        limit_memory(config.memory_bytes)
        self._name = config.name
        self._make = load_environment(config.name, config.options)
        self._episodes: dict[int, Environment] = {}

    def open(self, episode: int, task: Task, over: Sequence[int]) -> None:
        self._forget(over)
        with self._memory():
            environment = self._make()
            environment.reset(task)
            self._episodes[episode] = environment

    def step(self, episode: int, response: str, over: Sequence[int]) -> Observation:
        self._forget(over)
        with self._memory():
            return checked_observation(self._episodes[episode].step(response))

    def settle(self) -> None:
        """Answers once every earlier call has ended."""

    def _forget(self, over: Sequence[int]) -> None:
        for episode in over:
            self._episodes.pop(episode, None)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise out_of_memory(self._name) from error
