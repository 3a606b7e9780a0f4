"""The generation units of a job, seen from the loop: prompts in, whole groups out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub
from nereus_common.core.errors import DeadlineExceeded, JobFailed
from nereus_common.rl.assembly import Completion, Group
from nereus_common.rl.prompts import Prompt
from nereus_common.rpc import calling
from nereus_common.rpc.together import together

from .placed import PlacedStage, PlacedUnit


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; `temperature` 0 is greedy. `version`: the state that must be serving."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    version: int


@dataclass(slots=True)
class _Growing:
    """One response while its pieces arrive."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: int = pb.FINISH_REASON_UNSPECIFIED

    def take(self, piece: pb.GenerateResponse) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.token_ids)
        self.finish = piece.finish_reason

    def done(self) -> Completion:
        return Completion(
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.versions),
            self.finish == pb.FINISH_REASON_STOP,
        )


class GenerationPool:
    """Hands prompts to units as they have room; a group stays whole on one unit."""

    def __init__(self, stage: PlacedStage, timeout: float) -> None:
        self._stage = stage
        self._timeout = timeout
        self._requests = 0

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """One group per prompt, in the order of `prompts`. `timeout` of the pool holds for the whole call."""
        waiting = list(enumerate(prompts))[::-1]
        groups: list[Group | None] = [None] * len(prompts)

        async def serve(unit: PlacedUnit) -> None:
            while waiting:
                index, prompt = waiting.pop()
                groups[index] = await self._one(unit, prompt, sampling)

        lanes = self._lanes(sampling.samples)
        try:
            async with asyncio.timeout(self._timeout):
                await together(serve(unit) for unit in self._stage.units for _ in range(lanes))
        except TimeoutError:
            missing = [prompt.position for prompt, group in zip(prompts, groups, strict=True) if group is None]
            raise DeadlineExceeded(
                f"{self._stage.name}: {len(missing)} of {len(prompts)} groups, the one at position {missing[0]} among "
                f"them, were not whole after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for fewer or shorter responses",
            ) from None
        return [group for group in groups if group is not None]

    def _lanes(self, samples: int) -> int:
        """Groups in flight on one unit: as many as its sequence slots hold, and one more waiting."""
        limits = self._stage.plan.generation
        assert limits is not None
        return max(1, limits.max_sequences // samples) + 1

    async def _one(self, unit: PlacedUnit, prompt: Prompt, sampling: Sampling) -> Group:
        self._requests += 1
        request = pb.GenerateRequest(
            unit_id=unit.id,
            epoch=unit.epoch,
            request_id=f"{unit.id}.{sampling.version}.{self._requests}",
            prompt_token_ids=prompt.token_ids,
            samples=sampling.samples,
            sampling=pb.Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            version=sampling.version,
        )
        growing = [_Growing([], [], []) for _ in range(sampling.samples)]
        with calling("Generate", unit.service):
            async for piece in GenerationServiceStub(unit.channel).Generate(request, timeout=self._timeout):
                growing[piece.sample].take(piece)
        self._check_complete(unit, prompt, growing)
        return Group(prompt.position, prompt.token_ids, tuple(one.done() for one in growing))

    def _check_complete(self, unit: PlacedUnit, prompt: Prompt, growing: Sequence[_Growing]) -> None:
        whole = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
        if any(one.finish not in whole for one in growing):
            raise JobFailed(
                f"unit {unit.id} ended its stream before the group of prompt {prompt.position} was whole",
                unit=unit.id,
            )
