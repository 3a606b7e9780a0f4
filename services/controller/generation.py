"""The generation units of a job, seen from the loop: a prompt in, whole completions out.

Units may be replaced while they sample. A unit that is to go is drained; what it hands back goes on, from the tokens it
has, on a unit of the stage that takes its place, and so does what was about to be sent to it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from nereus.spec.options import InFlight
from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub
from nereus_common.core.errors import (
    DeadlineExceeded,
    IllegalTransition,
    JobFailed,
    NotFound,
    ProcessLost,
    Unavailable,
)
from nereus_common.rl.assembly import Completion
from nereus_common.rpc import calling
from nereus_common.rpc.together import together

from .placed import PlacedStage, PlacedUnit

ANY_VERSION = -1
ANSWER_SECONDS = 2.0
"""What a unit has beyond its time for a drain to say how many requests are left."""
_WHOLE = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
_REFUSALS = (Unavailable, IllegalTransition, NotFound, ProcessLost)
"""Of a unit that is drained, asleep or released."""

OnUnit = Callable[[PlacedUnit], Awaitable[None]]


class Requeued(Exception):
    """A response was thrown away because its unit went: the whole group is to be drawn again."""


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
    finish: int = pb.FINISH_REASON_INTERRUPTED

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
    """All replicas of the generation model-stage. `timeout` holds for every single request, `patience` for the wait
    until another unit has taken the place of one that is to go, by default as long; in seconds."""

    def __init__(self, stage: PlacedStage, timeout: float, patience: float | None = None) -> None:
        self._stage = stage
        self._timeout = timeout
        self._patience = timeout if patience is None else patience
        self._requests = 0
        self._growing: Counter[str] = Counter()
        """Responses in flight by unit."""
        self._busy, self._busy_since = 0.0, 0.0
        self._drains = 0
        self._going: dict[str, InFlight] = {}
        """Units that are to go, and how."""
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def units(self) -> Sequence[PlacedUnit]:
        return self._stage.units

    @property
    def busy_seconds(self) -> float:
        """Since it was made, seconds in which anything was in flight."""
        return self._busy + (time.monotonic() - self._busy_since if self._growing.total() else 0.0)

    def _grow(self, unit: PlacedUnit, by: int) -> None:
        """So many more responses are in flight on `unit`."""
        before = self._growing.total()
        self._growing[unit.id] += by
        if not before:
            self._busy_since = time.monotonic()
        elif not self._growing.total():
            self._busy += time.monotonic() - self._busy_since

    def room(self, samples: int) -> int:
        """How many groups a unit has in flight at most: as many as its sequence slots hold, and one more waiting."""
        limits = self._stage.plan.generation
        assert limits is not None
        return max(1, limits.max_sequences // samples) + 1

    def present(self, unit: PlacedUnit) -> PlacedUnit:
        """The unit, or the one in its place."""
        same = (one for one in self.units if one.id == unit.id)
        return next(same, self.units[unit.replica % len(self.units)])

    def in_flight(self, units: Iterable[PlacedUnit]) -> int:
        """How many responses these units sample now."""
        return sum(self._growing[unit.id] for unit in units)

    async def drain(self, how: InFlight, timeout: float, units: Collection[PlacedUnit] | None = None) -> int:
        """Send nothing more to these units, all by default, and have them end what they have in flight.

        How many requests are left on them after `timeout` seconds; may be called again. Until `replace` or `undo`,
        what was meant for them waits.
        """
        leaving = self.units if units is None else units
        self._going |= {unit.id: how for unit in leaving}
        self._drains += 1
        self._settled.clear()
        drain = pb.Drain.Value(f"DRAIN_{how.upper()}")

        async def one(unit: PlacedUnit) -> int:
            request = pb.DrainUnitRequest(unit_id=unit.id, epoch=unit.epoch, how=drain, timeout_seconds=timeout)
            with calling("DrainUnit", unit.service):
                stub = GenerationServiceStub(unit.channel)
                return (await stub.DrainUnit(request, timeout=timeout + ANSWER_SECONDS)).left

        return sum(await together(one(unit) for unit in leaving))

    async def undo(self) -> None:
        """The drained units stay, and take requests again."""

        async def one(unit: PlacedUnit) -> None:
            request = pb.ResumeUnitRequest(unit_id=unit.id, epoch=unit.epoch)
            with calling("ResumeUnit", unit.service):
                await GenerationServiceStub(unit.channel).ResumeUnit(request, timeout=self._timeout)

        await together(one(unit) for unit in self.units if unit.id in self._going)
        self.replace(self._stage)

    def replace(self, stage: PlacedStage) -> None:
        """These are the units from now on: what waits, and what was handed back, goes on on them."""
        self._stage = stage
        self._going = {}
        self._settled.set()

    async def sample(
        self, unit: PlacedUnit, prompt: Sequence[int], samples: int, sampling: Sampling, version: int = ANY_VERSION
    ) -> list[Completion]:
        """`samples` responses to one prompt, all by one unit, or by the one that takes its place.

        StaleVersion when it serves another version; Requeued when they were thrown away; DeadlineExceeded when no unit
        took its place in time.
        """
        responses = [_Growing() for _ in range(samples)]
        while growing := [one for one in responses if one.finish == pb.FINISH_REASON_INTERRUPTED]:
            unit = await self._staying(unit)
            parts = [[one] for one in growing] if any(one.token_ids for one in growing) else [growing]
            await together(self._sample_on(unit, prompt, part, sampling, version) for part in parts)
            if any(one.finish == pb.FINISH_REASON_REQUEUED for one in responses):
                raise Requeued(f"unit {unit.id} threw its responses away")
        if any(one.finish not in _WHOLE for one in responses):
            raise JobFailed(f"unit {unit.id} ended a request before it was whole", unit=unit.id)
        return [one.done() for one in responses]

    async def _staying(self, unit: PlacedUnit) -> PlacedUnit:
        """The unit, or the one in its place; waits while it is to go."""
        how = self._going.get(unit.id)
        if how is not None:
            try:
                async with asyncio.timeout(self._patience):
                    await self._settled.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"unit {unit.id} is to go, and no other has taken its place within {self._patience:g} s",
                    remedy="raise deadlines.place",
                    unit=unit.id,
                ) from None
            if how == "requeue":  # it may be the next turn of a dialogue that must not go on
                raise Requeued(f"unit {unit.id} went before it could sample")
        return self.present(unit)

    async def _sample_on(
        self, unit: PlacedUnit, prompt: Sequence[int], growing: list[_Growing], sampling: Sampling, version: int
    ) -> None:
        """Let `growing` grow to their ends, or until they are handed back: then each says so in its finish."""
        self._requests += 1
        request = pb.GenerateRequest(
            unit_id=unit.id,
            epoch=unit.epoch,
            request_id=f"{unit.id}.{self._requests}",
            prompt_token_ids=prompt,
            samples=len(growing),
            sampling=pb.Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=sampling.stop_token_ids,
            ),
            version=version,
            across_versions=sampling.across_versions,
            response_token_ids=growing[0].token_ids,
        )
        begun, drains = False, self._drains
        self._grow(unit, len(growing))
        try:
            with calling("Generate", unit.service):
                async for piece in GenerationServiceStub(unit.channel).Generate(request, timeout=self._timeout):
                    begun = True
                    growing[piece.sample].take(piece)
        except _REFUSALS:
            gone = all(unit.id != one.id for one in self.units)
            if begun or not (gone or self._drains > drains):
                raise  # else it came too late, to a unit that was to go
        finally:
            self._grow(unit, -len(growing))

    async def spread(self, work: Sequence[OnUnit], samples: int) -> None:
        """Run every piece of work on some unit, no more at once than fit; what is requeued is run again.

        DeadlineExceeded after `timeout`.
        """
        waiting = list(work)[::-1]

        async def serve(unit: PlacedUnit) -> None:
            while waiting:
                piece = waiting.pop()
                try:
                    await piece(unit)
                except Requeued:
                    waiting.append(piece)

        try:
            async with asyncio.timeout(self._timeout):
                await together(serve(unit) for _ in range(self.room(samples)) for unit in self.units)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._stage.name}: {len(waiting)} of {len(work)} requests were not begun after {self._timeout:g} s",
                remedy="raise deadlines.generate, or ask for fewer or shorter responses",
            ) from None
