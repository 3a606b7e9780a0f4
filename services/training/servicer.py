"""TrainingService on the wire: nothing but translation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import grpc.aio

from nereus.v1 import training_pb2 as pb
from nereus.v1.training_pb2_grpc import TrainingServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import UnitId
from nereus_common.engines.training.base import TrainStepSpec
from nereus_common.stages.servicer import header_and_columns, time_left
from nereus_common.stages.units import Units

from .unit import TrainingUnit

Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 3600.0
"""Seconds an update may take when its caller sets no deadline."""


class TrainingServicer(TrainingServiceServicer):
    def __init__(self, units: Units) -> None:
        self._units = units

    async def TrainStep(
        self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Context
    ) -> pb.TrainStepResponse:
        header, columns = await header_and_columns(request_iterator, "TrainStep")
        async with self._units.working(UnitId(header.unit_id), header.epoch) as entry:
            unit = cast("TrainingUnit", entry.host)
            result = await unit.train(
                _step_from_pb(header),
                columns,
                pin_timeout=header.pin_timeout_seconds,
                timeout=time_left(context, LIMIT),
            )
        return pb.TrainStepResponse(
            version=result.version,
            metrics=dict(result.metrics),
            seconds=dict(result.seconds),
            peak_memory_bytes=result.peak_memory_bytes,
        )

    async def TakeSnapshot(self, request: pb.TakeSnapshotRequest, context: Context) -> pb.TakeSnapshotResponse:
        async with self._units.working(UnitId(request.unit_id), request.epoch) as entry:
            unit = cast("TrainingUnit", entry.host)
            await unit.take_snapshot(request.version, time_left(context, LIMIT))
        return pb.TakeSnapshotResponse()

    async def WriteSnapshot(self, request: pb.WriteSnapshotRequest, context: Context) -> pb.WriteSnapshotResponse:
        # not `working`: it runs beside an update
        unit = cast("TrainingUnit", self._units.serving(UnitId(request.unit_id), request.epoch).host)
        parts = await unit.write_snapshot(request.version, request.folder, time_left(context, LIMIT))
        return pb.WriteSnapshotResponse(parts_json=parts)


def _step_from_pb(header: pb.TrainStepHeader) -> TrainStepSpec:
    return TrainStepSpec(
        step=header.step,
        loss=_loss(header.loss_json),
        learning_rate=header.learning_rate,
        max_grad_norm=header.max_grad_norm,
        minibatch_tokens=tuple(header.minibatch_tokens) or (header.global_tokens,),
        epochs=max(header.epochs, 1),
        temperature=header.temperature,
    )


def _loss(text: str) -> Mapping[str, Any]:
    try:
        loss = json.loads(text)
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"loss_json is not JSON: {wrong}", field="loss_json") from wrong
    if not isinstance(loss, dict):
        raise InvalidInput("loss_json is not an object", field="loss_json")
    return loss
