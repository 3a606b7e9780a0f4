"""CoordinatorService on the wire: nothing but translation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc.aio

from nereus.v1 import coordinator_pb2 as pb
from nereus.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import JobId, Stage
from nereus_common.rpc.convert import plan_from_pb

from .jobs import PlacedJob, PlacedJobs
from .placement import ModelSource, Placement
from .remote_unit import RemoteUnit
from .sync import SyncReport

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(CoordinatorServiceServicer):
    def __init__(self, jobs: PlacedJobs) -> None:
        self._jobs = jobs

    async def PlaceJob(self, request: pb.PlaceJobRequest, context: Context) -> pb.PlaceJobResponse:
        placed = await self._jobs.place(_placement(request), request.timeout_seconds)
        return _placed_to_pb(placed)

    async def SyncWeights(self, request: pb.SyncWeightsRequest, context: Context) -> pb.SyncWeightsResponse:
        report = await self._jobs.sync(
            JobId(request.job_id), request.epoch, request.model, request.version, request.timeout_seconds
        )
        return pb.SyncWeightsResponse(report=_report_to_pb(report))

    async def ReleaseJob(self, request: pb.ReleaseJobRequest, context: Context) -> pb.ReleaseJobResponse:
        await self._jobs.release(JobId(request.job_id))
        return pb.ReleaseJobResponse()


def _placement(request: pb.PlaceJobRequest) -> Placement:
    return Placement(
        job=JobId(request.job_id),
        epoch=request.epoch,
        plan=plan_from_pb(request.plan),
        models={entry.model.name: _source(entry) for entry in request.models},
        seed=request.seed,
        version=request.version,
        checkpoint=request.checkpoint,
    )


def _source(entry: pb.ModelEngine) -> ModelSource:
    return ModelSource(
        name=entry.model.name,
        path=entry.model.path,
        engines={Stage(stage): name for stage, name in entry.engines.items()},
        options={Stage(stage): _options(entry.model.name, stage, text) for stage, text in entry.options_json.items()},
    )


def _options(model: str, stage: str, text: str) -> Mapping[str, Any]:
    options = json.loads(text or "{}")
    if not isinstance(options, dict):
        raise InvalidInput(f"models.{model}.engines.{stage}.options is not a mapping", field="options")
    return options


def _placed_to_pb(placed: PlacedJob) -> pb.PlaceJobResponse:
    return pb.PlaceJobResponse(
        units=[_unit_to_pb(unit) for unit in placed.units],
        syncs=[_report_to_pb(report) for report in placed.reports],
    )


def _unit_to_pb(unit: RemoteUnit) -> pb.PlacedUnit:
    return pb.PlacedUnit(
        unit_id=unit.id, model_stage=str(unit.unit.model_stage), replica=unit.unit.replica, service=unit.service
    )


def _report_to_pb(report: SyncReport) -> pb.SyncReport:
    return pb.SyncReport(
        model=report.model,
        version=report.version,
        bytes_moved=report.bytes_moved,
        bytes_needed=report.bytes_needed,
        seconds=report.seconds,
        phases=dict(report.phases),
    )
