"""InferenceService on the wire: nothing but translation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio

from nereus.v1 import inference_pb2 as pb
from nereus.v1.columns_pb2 import ColumnChunk
from nereus.v1.inference_pb2_grpc import InferenceServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import UnitId
from nereus_common.rpc import chunks_from_columns, columns_from_chunks
from nereus_common.stages.servicer import time_left
from nereus_common.stages.units import Units

from .unit import InferenceUnit

Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 3600.0
"""Seconds scoring may take when its caller sets no deadline."""


class InferenceServicer(InferenceServiceServicer):
    def __init__(self, units: Units) -> None:
        self._units = units

    async def Score(
        self, request_iterator: AsyncIterator[pb.ScoreRequest], context: Context
    ) -> AsyncIterator[pb.ScoreResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("header"):
            raise InvalidInput("Score: the first message is not a header", field="header")
        columns = await columns_from_chunks(_chunks(request_iterator))
        async with self._units.working(UnitId(first.header.unit_id), first.header.epoch) as entry:
            unit = cast("InferenceUnit", entry.host)
            scored = await unit.score(columns, first.header.temperature, time_left(context, LIMIT))
        for chunk in chunks_from_columns({"logprobs": scored}):
            yield pb.ScoreResponse(chunk=chunk)


async def _chunks(requests: AsyncIterator[pb.ScoreRequest]) -> AsyncIterator[ColumnChunk]:
    async for request in requests:
        if not request.HasField("chunk"):
            raise InvalidInput("Score: a second header", remedy="send one header, then chunks", field="header")
        yield request.chunk
