"""The reward functions and the environment of a job, each in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nereus.spec import JobSpec
from nereus.spec.data import EnvironmentSpec
from nereus_common.core.ids import JobId
from nereus_common.engines.environments import EnvironmentChoice, EnvironmentPool, play
from nereus_common.engines.rewards import RewardPool, TimedReward
from nereus_common.engines.tokenizer import ChatTokenizer
from nereus_common.rl.assembly import Completion
from nereus_common.rl.environments import Task
from nereus_common.rl.episodes import EpisodeLimits
from nereus_common.rl.prompts import Prompt
from nereus_common.rl.rewards import RewardInput

from .sampler import Generate, Play


class Scoring:
    """`start` loads everything, so that what cannot be found fails the job before its units are placed."""

    def __init__(self, job: JobId, spec: JobSpec, folder: Path, tokenizer: ChatTokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._functions = [reward for reward in spec.rewards if reward.name]
        timed = [TimedReward(reward.name, reward.timeout_seconds) for reward in self._functions]
        self._rewards = RewardPool(job, timed, folder) if timed else None
        self._dialogues = _Dialogues(job, spec.environment, spec, folder, tokenizer) if spec.environment else None

    @property
    def play(self) -> Play | None:
        """How a sample is played out where there is an environment."""
        return self._dialogues.play if self._dialogues else None

    async def start(self) -> None:
        timeout = self._spec.deadlines.score
        if self._rewards is not None:
            await self._rewards.start(timeout=timeout)
        if self._dialogues is not None:
            await self._dialogues.start(timeout)

    async def score(self, samples: Sequence[RewardInput]) -> Mapping[str, Sequence[float]]:
        """By the label of each reward function, one score per sample."""
        if self._rewards is None:
            return {}
        scores = await self._rewards.score(samples, timeout=self._spec.deadlines.score)
        return {reward.label: [sample[index] for sample in scores] for index, reward in enumerate(self._functions)}

    async def close(self) -> None:
        if self._rewards is not None:
            await self._rewards.close()
        if self._dialogues is not None:
            await self._dialogues.close()


class _Dialogues:
    """Samples as dialogues with the job's environment."""

    def __init__(
        self, job: JobId, chosen: EnvironmentSpec, spec: JobSpec, folder: Path, tokenizer: ChatTokenizer
    ) -> None:
        choice = EnvironmentChoice(chosen.name, chosen.options, chosen.timeout_seconds, chosen.memory_bytes)
        self._pool = EnvironmentPool(job, choice, folder, processes=chosen.processes)
        self._limits = EpisodeLimits(chosen.max_turns, spec.sampling.max_tokens, chosen.max_tokens)
        self._tokenizer = tokenizer
        self._patience = spec.deadlines.generate

    async def start(self, timeout: float) -> None:
        """InvalidInput when the environment cannot be found, or the chat template cannot carry a dialogue."""
        self._tokenizer.observation_ids("")
        await self._pool.start(timeout=timeout)

    async def play(self, prompt: Prompt, sample: int, generate: Generate) -> Completion:
        question = prompt.question
        task = Task(prompt.position, sample, question.text, question.answer, question.metadata)
        return await play(
            self._pool,
            task,
            prompt.token_ids,
            generate,
            self._limits,
            self._tokenizer.observation_ids,
            self._tokenizer.decode,
            place_timeout=self._patience,
        )

    async def close(self) -> None:
        await self._pool.close()
