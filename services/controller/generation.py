"""The generation units of a job, seen from the loop: a prompt in, whole completions out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub
from nereus_common.core.errors import DeadlineExceeded, JobFailed
from nereus_common.rl.assembly import Completion
from nereus_common.rpc import calling
from nereus_common.rpc.together import together

from .placed import PlacedStage, PlacedUnit

ANY_VERSION = -1

OnUnit = Callable[[PlacedUnit], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; `temperature` 0 is greedy. `across_versions`: new weights interrupt, and the samples go on."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    across_versions: bool = False

    @property
    def greedy(self) -> Sampling:
        """The same, taking the likeliest token of the whole vocabulary."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(slots=True)
class _Growing:
    """One response while its pieces arrive."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
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
    """All replicas of the generation model-stage. `timeout` holds for every single request, in seconds."""

    def __init__(self, stage: PlacedStage, timeout: float) -> None:
        self._stage = stage
        self._timeout = timeout
        self._requests = 0

    @property
    def units(self) -> Sequence[PlacedUnit]:
        return self._stage.units

    def lanes(self, samples: int) -> list[PlacedUnit]:
        """A unit for every group that may be in flight: as many as its sequence slots hold, and one more waiting."""
        limits = self._stage.plan.generation
        assert limits is not None
        each = max(1, limits.max_sequences // samples) + 1
        return [unit for _ in range(each) for unit in self.units]

    async def sample(
        self, unit: PlacedUnit, prompt: Sequence[int], samples: int, sampling: Sampling, version: int = ANY_VERSION
    ) -> list[Completion]:
        """`samples` responses to one prompt, all by one unit. StaleVersion when it serves another version."""
        self._requests += 1
        request = pb.GenerateRequest(
            unit_id=unit.id,
            epoch=unit.epoch,
            request_id=f"{unit.id}.{self._requests}",
            prompt_token_ids=prompt,
            samples=samples,
            sampling=pb.Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            version=version,
            across_versions=sampling.across_versions,
        )
        growing = [_Growing() for _ in range(samples)]
        with calling("Generate", unit.service):
            async for piece in GenerationServiceStub(unit.channel).Generate(request, timeout=self._timeout):
                growing[piece.sample].take(piece)
        whole = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
        if any(one.finish not in whole for one in growing):
            raise JobFailed(f"unit {unit.id} ended request {request.request_id} before it was whole", unit=unit.id)
        return [one.done() for one in growing]

    async def spread(self, work: Sequence[OnUnit], samples: int) -> None:
        """Run every piece of work on some unit, no more at once than fit; DeadlineExceeded after `timeout`."""
        waiting = list(work)[::-1]

        async def serve(unit: PlacedUnit) -> None:
            while waiting:
                await waiting.pop()(unit)

        try:
            async with asyncio.timeout(self._timeout):
                await together(serve(unit) for unit in self.lanes(samples))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._stage.name}: {len(waiting)} of {len(work)} requests were not begun after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for fewer or shorter responses",
            ) from None
