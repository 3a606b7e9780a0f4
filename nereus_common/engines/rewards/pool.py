"""Scores samples in a few worker processes, each call under a time limit.

A reward is a stranger's code: it may raise, return nonsense, hang or take its process down. Each of these ends in a
JobFailed that names the reward and the sample; the processes are replaced, and the pool can be used again. So does
one that needs more memory than its process may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.engines.rewards.body import RewardBodyConfig
from nereus_common.engines.strangers import Blame, ask, worker_spec
from nereus_common.rl.rewards import RewardInput
from nereus_common.workers import Worker, WorkerSpec

_BODY = "nereus_common.engines.rewards.body:RewardBody"


@dataclass(frozen=True, slots=True)
class TimedReward:
    """`timeout` in seconds, for one sample."""

    name: str
    timeout: float = 10.0


class RewardPool:
    """`processes` workers for one job, of at most `memory_bytes` each; `name` begins their names and those of their
    logs in `log_folder`."""

    def __init__(
        self,
        name: str,
        rewards: Sequence[TimedReward],
        log_folder: Path,
        *,
        processes: int = 2,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self._name = name
        self._rewards = tuple(rewards)
        self._log_folder = log_folder
        self._processes = processes
        self._memory_bytes = memory_bytes
        self._workers: list[Worker] = []
        self._turn = asyncio.Lock()

    async def start(self, *, timeout: float) -> None:
        """Start the processes and load every reward; InvalidInput when one cannot be found. May be called again."""
        while len(self._workers) < self._processes:
            self._workers.append(await Worker.start(self._spec(len(self._workers)), timeout=timeout))

    async def score(self, samples: Sequence[RewardInput], *, timeout: float) -> list[tuple[float, ...]]:
        """For each sample, in order, what every reward gives it. Calls at the same time take turns.

        JobFailed names the reward and the sample that went wrong; DeadlineExceeded when all of it takes longer than
        `timeout` seconds, counted from its turn on.
        """
        async with self._turn:
            return await self._score(samples, timeout)

    async def _score(self, samples: Sequence[RewardInput], timeout: float) -> list[tuple[float, ...]]:
        scores: list[tuple[float, ...]] = [()] * len(samples)
        pending = iter(enumerate(samples))
        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                await self.start(timeout=timeout)
                for worker in self._workers:
                    group.create_task(self._run(worker, pending, scores))
        except BaseException as error:
            await self.close()  # a worker may still be inside the call that was given up
            raise self._cause(error, len(samples), timeout) from error
        return scores

    async def close(self) -> None:
        """End the processes, at once."""
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.stop(grace=0)

    async def _run(
        self, worker: Worker, pending: Iterator[tuple[int, RewardInput]], scores: list[tuple[float, ...]]
    ) -> None:
        for index, sample in pending:
            scores[index] = tuple([await self._one(worker, reward, sample) for reward in self._rewards])

    async def _one(self, worker: Worker, reward: TimedReward, sample: RewardInput) -> float:
        blame = _blame(reward, sample)
        return float(await ask(worker, "score", reward.name, sample, timeout=reward.timeout, blame=blame))

    def _spec(self, number: int) -> WorkerSpec:
        config = RewardBodyConfig(tuple(reward.name for reward in self._rewards), self._memory_bytes)
        return worker_spec(f"{self._name}.reward{number}", _BODY, config, self._log_folder)

    def _cause(self, error: BaseException, count: int, timeout: float) -> BaseException:
        if isinstance(error, BaseExceptionGroup):
            return error.exceptions[0]
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(
                f"{self._name}: scoring {count} samples took longer than {timeout:g} s",
                remedy="raise deadlines.score or make the reward faster",
            )
        return error


def _blame(reward: TimedReward, sample: RewardInput) -> Blame:
    return Blame(
        f"reward {reward.name}",
        f"on the prompt at position {sample.position}, sample {sample.sample}",
        "fix the reward, or raise its timeout_seconds",
        {"reward": reward.name, "position": sample.position, "sample": sample.sample},
    )
