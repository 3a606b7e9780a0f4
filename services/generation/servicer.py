"""GenerationService on the wire: nothing but translation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc.aio

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceServicer
from nereus_common.core.ids import UnitId
from nereus_common.engines.generation.base import Finish, GenerationRequest, Piece, Sampling
from nereus_common.stages.servicer import time_left
from nereus_common.stages.units import Units

from .unit import GenerationUnit

Context = grpc.aio.ServicerContext[Any, Any]

LIMIT = 3600.0
"""Seconds a request may take when its caller sets no deadline."""
_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
}


class GenerationServicer(GenerationServiceServicer):
    def __init__(self, units: Units) -> None:
        self._units = units

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        entry = self._units.serving(UnitId(request.unit_id), request.epoch, soon=request.across_versions)
        unit = cast("GenerationUnit", entry.host)
        pieces = unit.generate(_request_from_pb(request), time_left(context, LIMIT))
        async with aclosing(cast("Any", pieces)):
            async for piece in pieces:
                yield _piece_to_pb(piece)

    async def AbortGeneration(self, request: pb.AbortGenerationRequest, context: Context) -> pb.AbortGenerationResponse:
        for entry in self._units.entries():
            if entry.spec.unit == request.unit_id:
                await cast("GenerationUnit", entry.host).abort(request.request_id, time_left(context, LIMIT))
        return pb.AbortGenerationResponse()


def _request_from_pb(request: pb.GenerateRequest) -> GenerationRequest:
    sampling = request.sampling
    return GenerationRequest(
        id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sampling.stop_token_ids),
        ),
        samples=request.samples,
        version=request.version,
        stream_interval=request.stream_interval,
        across_versions=request.across_versions,
    )


def _piece_to_pb(piece: Piece) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        sample=piece.sample,
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        version=piece.version,
        finish_reason=_FINISH[piece.finish],
    )
