"""GenerationService on the wire: nothing but translation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc.aio

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import UnitId
from nereus_common.engines.generation.base import Drain, Finish, GenerationRequest, Piece, Sampling
from nereus_common.stages.servicer import time_left
from nereus_common.stages.units import Units

from .unit import ANSWER_SECONDS, GenerationUnit

Context = grpc.aio.ServicerContext[Any, Any]

LIMIT = 3600.0
"""Seconds a request may take when its caller sets no deadline."""
_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
    Finish.INTERRUPTED: pb.FINISH_REASON_INTERRUPTED,
    Finish.REQUEUED: pb.FINISH_REASON_REQUEUED,
}
_DRAIN = {
    pb.DRAIN_FINISH: Drain.FINISH,
    pb.DRAIN_RESUME: Drain.RESUME,
    pb.DRAIN_REQUEUE: Drain.REQUEUE,
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

    async def DrainUnit(self, request: pb.DrainUnitRequest, context: Context) -> pb.DrainUnitResponse:
        if request.how not in _DRAIN:
            raise InvalidInput("a drain says how", remedy="finish, resume or requeue", field="how")
        unit = self._unit(request.unit_id, request.epoch)
        timeout = min(request.timeout_seconds, max(time_left(context, LIMIT) - ANSWER_SECONDS, 0.0))
        return pb.DrainUnitResponse(left=await unit.drain(_DRAIN[request.how], timeout))

    async def ResumeUnit(self, request: pb.ResumeUnitRequest, context: Context) -> pb.ResumeUnitResponse:
        await self._unit(request.unit_id, request.epoch).admit_again(time_left(context, LIMIT))
        return pb.ResumeUnitResponse()

    def _unit(self, unit: str, epoch: int) -> GenerationUnit:
        return cast("GenerationUnit", self._units.serving(UnitId(unit), epoch, soon=True).host)


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
        response_token_ids=tuple(request.response_token_ids),
    )


def _piece_to_pb(piece: Piece) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        sample=piece.sample,
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        version=piece.version,
        finish_reason=_FINISH[piece.finish],
    )
