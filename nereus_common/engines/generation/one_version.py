"""A request that stays with the version that it was begun under: all its samples together, as one flight."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from nereus_common.engines.generation.base import Delta, Finish, GenerationEngine, GenerationRequest, Piece
from nereus_common.engines.generation.continuation import Continuation
from nereus_common.engines.generation.pieces import Pieces


class OneVersion:
    """One request under way; `version` is served until it ends."""

    def __init__(self, engine: GenerationEngine, request: GenerationRequest, version: int) -> None:
        self._engine = engine
        self._request = request
        self._version = version
        self._samples = [Continuation(request, sample) for sample in range(request.samples)]
        self._cut = Finish.ABORT

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Run; closing the iterator aborts."""
        pieces = Pieces(self._version, self._request.stream_interval)
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                for piece in pieces.add(delta):
                    yield piece

    async def end(self, cut: Finish) -> None:
        """End every sample with `cut`, unless it is at an end of its own. The first cut stands."""
        self._cut = cut if self._cut is Finish.ABORT else self._cut
        await self._engine.abort(self._request.id)

    async def _deltas(self) -> AsyncGenerator[Delta]:
        first = self._samples[0]
        if first.finish is not None:  # another unit has sampled all of it
            yield Delta(0, (), (), first.finish)
            return
        whole = replace(first.leg(), id=self._request.id, samples=self._request.samples)
        async with aclosing(self._engine.generate(whole)) as deltas:
            async for delta in deltas:
                yield self._samples[delta.sample].take(delta, cut=self._cut)
