"""A request that goes across versions: its samples in flight one by one, parked while new weights are applied.

Every token is handed out once, under the version that sampled it: what the engine gave before an interrupt is handed
out and is part of the next leg's prompt; what it had not given is sampled anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from nereus_common.core.errors import NereusError
from nereus_common.engines.generation.base import Finish, GenerationEngine, GenerationRequest, Piece
from nereus_common.engines.generation.continuation import Continuation
from nereus_common.engines.generation.gate import NONE, Gate
from nereus_common.engines.generation.pieces import Pieces


class Crossing:
    """One request under way. `deadline`, by the loop's clock, bounds the waits for a version.

    The samples run on tasks of their own, so that a caller who reads slowly never keeps new weights waiting: what
    is ready and not yet read is bounded by the tokens that the request may sample.
    """

    def __init__(self, gate: Gate, engine: GenerationEngine, request: GenerationRequest, deadline: float) -> None:
        self._gate = gate
        self._engine = engine
        self._interval = request.stream_interval
        self._deadline = deadline
        self._samples = [Continuation(request, sample) for sample in range(request.samples)]
        self._legs: dict[str, str] = {}
        """Sample → id of its leg in the engine, while it is in flight."""
        self._cut: Finish | None = None
        """Why every sample ends now."""
        most = request.sampling.max_tokens + 2  # pieces of one token each, an abort, an error
        self._ready: asyncio.Queue[Piece | Exception] = asyncio.Queue(request.samples * most)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Run; closing the iterator aborts. The first error of any sample ends all."""
        tasks = [asyncio.create_task(self._run(sample), name=sample.name) for sample in self._samples]
        growing = len(tasks)
        try:
            while growing:
                piece = await self._ready.get()
                if isinstance(piece, Exception):
                    raise piece
                growing -= piece.finish is not None
                yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def end(self, cut: Finish) -> None:
        """End every sample with `cut`, in flight or parked, unless it is at an end of its own. The first cut stands."""
        self._cut = self._cut or cut
        for sample in self._samples:
            self._gate.withdraw(sample.name)
        for leg in tuple(self._legs.values()):
            await self._engine.abort(leg)

    async def _run(self, sample: Continuation) -> None:
        version = NONE
        try:
            if sample.finish is not None:
                self._hand_out([Piece(sample.sample, (), (), version, sample.finish)])
            while sample.finish is None:
                if not self._cut and await self._gate.park(sample.name, self._deadline) and not self._cut:
                    version = await self._fly(sample)
                else:
                    sample.finish = self._cut or Finish.ABORT
                    self._hand_out([Piece(sample.sample, (), (), version, sample.finish)])
        except Exception as error:  # raised to the caller, by `pieces`
            self._ready.put_nowait(error)

    async def _fly(self, sample: Continuation) -> int:
        """Sample under the version now served, to the end or an interrupt; gives that version."""
        leg, interrupted, delta = sample.leg(), False, None

        async def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            await self._engine.abort(leg.id)

        with self._gate.flight(sample.name, interrupt) as version:
            self._legs[sample.name] = leg.id
            pieces = Pieces(version, self._interval)
            try:
                async with aclosing(self._engine.generate(leg)) as deltas:
                    async for delta in deltas:
                        cut = self._cut or (None if interrupted else Finish.ABORT)
                        self._hand_out(pieces.add(sample.take(delta, cut=cut)))
            finally:
                del self._legs[sample.name]
            self._hand_out(pieces.rest())
        if delta is None or delta.finish is None:
            raise NereusError(f"the engine ended {leg.id} without a word why", request=leg.id)
        return version

    def _hand_out(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._ready.put_nowait(piece)
