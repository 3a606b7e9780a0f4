"""One group from one unit: sampled, played out with an environment where there is one, and scored by functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nereus_common.rl.assembly import Completion, Group
from nereus_common.rl.prompts import Prompt
from nereus_common.rl.rewards import RewardInput
from nereus_common.rl.step_rollouts import ScoredGroup
from nereus_common.rpc.together import together

from .generation import GenerationPool, Sampling
from .placed import PlacedUnit

Score = Callable[[Sequence[RewardInput]], Awaitable[Mapping[str, Sequence[float]]]]
"""The scores of every reward function by its label, one per sample."""
Decode = Callable[[Sequence[int]], str]
Generate = Callable[[Sequence[int], int], Awaitable[Completion]]
"""(prompt, at most so many tokens) → one response."""


class Play(Protocol):
    """A whole dialogue with an environment, as one completion."""

    def __call__(self, prompt: Prompt, sample: int, generate: Generate) -> Awaitable[Completion]: ...


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """`play` is None where a response is the whole of a sample. `baseline`: a greedy response is sampled too."""

    pool: GenerationPool
    sampling: Sampling
    samples: int
    score: Score
    decode: Decode
    play: Play | None = None
    baseline: bool = False

    async def group(self, unit: PlacedUnit, prompt: Prompt) -> ScoredGroup:
        wanted = [self._completions(unit, prompt, self.samples, self.sampling)]
        if self.baseline:
            wanted.append(self._completions(unit, prompt, 1, self.sampling.greedy))
        completions, *rest = await together(wanted)
        baseline = rest[0][0] if rest else None
        everything = [*completions, *([baseline] if baseline else [])]
        inputs = [self._reward_input(prompt, number, one) for number, one in enumerate(everything)]
        scores = await self.score(inputs)
        count = len(completions)
        return ScoredGroup(
            Group(prompt.position, prompt.token_ids, tuple(completions)),
            {label: tuple(values[:count]) for label, values in scores.items()},
            baseline,
            {label: values[count] for label, values in scores.items()} if baseline else {},
        )

    async def _completions(
        self, unit: PlacedUnit, prompt: Prompt, samples: int, sampling: Sampling
    ) -> Sequence[Completion]:
        play = self.play
        if play is None:
            return await self.pool.sample(unit, prompt.token_ids, samples, sampling)

        async def generate(ids: Sequence[int], max_tokens: int) -> Completion:
            turn = replace(sampling, max_tokens=min(max_tokens, sampling.max_tokens))
            (completion,) = await self.pool.sample(unit, ids, 1, turn)
            return completion

        async def dialogue(sample: int) -> Completion:
            return await play(prompt, sample, generate)

        return await together(dialogue(sample) for sample in range(samples))

    def _reward_input(self, prompt: Prompt, number: int, completion: Completion) -> RewardInput:
        return RewardInput(
            position=prompt.position,
            sample=number,
            prompt=prompt.question.text,
            response=self.decode(completion.token_ids),
            answer=prompt.question.answer,
            metadata=prompt.question.metadata,
            prompt_token_ids=prompt.token_ids,
            response_token_ids=completion.token_ids,
            finished=completion.finished,
        )
