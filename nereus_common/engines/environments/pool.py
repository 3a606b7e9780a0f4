"""Plays many episodes at once in a few worker processes, each call under a time limit, each process in bounded memory.

An environment is a stranger's code: it may raise, return nonsense, hang, take its process down or eat memory. Each of
these ends in a JobFailed that names the environment, the prompt's position and the turn. What raises or returns
nonsense ends its own episode alone. What hangs, exits or runs out of memory takes its process down, and every episode
that lives there fails at its next step with the same cause; the process is replaced. Nothing is played again by the
pool: an episode's state is gone with its process, and whether to start over is for the caller to say.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.engines.environments.body import EnvironmentBodyConfig
from nereus_common.engines.environments.seat import Seat
from nereus_common.engines.strangers import Blame, worker_spec
from nereus_common.rl.environments import Observation, Task

_BODY = "nereus_common.engines.environments.body:EnvironmentBody"


@dataclass(frozen=True, slots=True)
class EnvironmentChoice:
    """`timeout` in seconds, for one call; `memory_bytes` for one process, with all its episodes."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    memory_bytes: int = 1 << 30


class Dialogue:
    """An open episode. `turn` counts responses."""

    def __init__(self, choice: EnvironmentChoice, task: Task, number: int, seat: Seat) -> None:
        self.turn = 0
        self._choice = choice
        self._task = task
        self._number = number
        self._seat = seat

    async def begin(self) -> None:
        self._home = await self._seat.open(self._number, self._task, self._blame())

    async def step(self, response: str) -> Observation:
        """What the environment answers; JobFailed when it cannot."""
        self.turn += 1
        return await self._seat.step(self._home, self._number, response, self._blame())

    def _blame(self) -> Blame:
        task, name = self._task, self._choice.name
        return Blame(
            f"environment {name}",
            f"on the prompt at position {task.position}, sample {task.sample}, turn {self.turn}",
            "fix the environment, or raise its timeout_seconds or memory_bytes",
            {"environment": name, "position": task.position, "sample": task.sample, "turn": self.turn},
        )


class EnvironmentPool:
    """`processes` workers for one job; `name` begins their names and those of their logs in `log_folder`.

    At most `open_episodes` are open at once; more wait for a place.
    """

    def __init__(
        self,
        name: str,
        choice: EnvironmentChoice,
        log_folder: Path,
        *,
        processes: int = 2,
        open_episodes: int = 1024,
    ) -> None:
        self._name = name
        self._choice = choice
        self._seats = [self._seat(number, log_folder) for number in range(processes)]
        self._numbers = itertools.count()
        self._open_episodes = open_episodes
        self._places = asyncio.Semaphore(open_episodes)

    async def start(self, *, timeout: float) -> None:
        """Start the processes and load the environment; InvalidInput when it cannot be found. May be called again."""
        for seat in self._seats:
            await seat.start(timeout)

    @asynccontextmanager
    async def episode(self, task: Task, *, timeout: float) -> AsyncIterator[Dialogue]:
        """An episode of its own, over at the end of the block.

        DeadlineExceeded when no place gets free within `timeout` seconds; JobFailed when it cannot begin.
        """
        await self._take_place(timeout)
        seat = min(self._seats, key=lambda seat: len(seat.episodes))
        number = next(self._numbers)
        dialogue = Dialogue(self._choice, task, number, seat)
        try:
            await dialogue.begin()
            yield dialogue
        finally:
            seat.leave(number)
            self._places.release()

    async def close(self) -> None:
        """End the processes and all episodes, at once."""
        for seat in self._seats:
            await seat.close()

    async def _take_place(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._name}: none of {self._open_episodes} open episodes ended within {timeout:g} s",
                remedy="generation may be stuck; or allow more open episodes",
            ) from None

    def _seat(self, number: int, log_folder: Path) -> Seat:
        choice = self._choice
        config = EnvironmentBodyConfig(choice.name, dict(choice.options), choice.memory_bytes)
        return Seat(worker_spec(f"{self._name}.environment{number}", _BODY, config, log_folder), choice.timeout)
