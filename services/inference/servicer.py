"""InferenceService on the wire: nothing but translation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio

from nereus.v1 import inference_pb2 as pb
from nereus.v1.inference_pb2_grpc import InferenceServiceServicer
from nereus_common.core.ids import UnitId
from nereus_common.core.workflow import Work
from nereus_common.rpc import chunks_from_columns
from nereus_common.stages.servicer import header_and_columns, time_left
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
        header, columns = await header_and_columns(request_iterator, "Score")
        async with self._units.working(UnitId(header.unit_id), header.epoch) as entry:
            unit = cast("InferenceUnit", entry.host)
            work = header.work or Work.LOGPROBS
            scored = await unit.score(columns, work, header.temperature, time_left(context, LIMIT))
        for chunk in chunks_from_columns(scored):
            yield pb.ScoreResponse(chunk=chunk)
