"""CoordinatorService on the wire: nothing but translation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc.aio

from nereus.v1 import coordinator_pb2 as pb
from nereus.v1 import transitions_pb2
from nereus.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import JobId, ModelStage, Stage, TransitionId
from nereus_common.rpc.convert import digests_to_pb, plan_from_pb
from nereus_common.rpc.transitions import dag_to_pb
from nereus_common.stages.convert import head_from_pb
from nereus_common.stages.servicer import time_left
from nereus_common.state.distance import LEVELS

from .jobs import PlacedJob, PlacedJobs
from .placement import ModelSource, Placement
from .remote_unit import RemoteUnit
from .sync import SyncReport
from .transitions import Shown, Transitions

Context = grpc.aio.ServicerContext[Any, Any]


DIGEST_SECONDS = 120.0


class CoordinatorServicer(CoordinatorServiceServicer):
    def __init__(self, jobs: PlacedJobs, transitions: Transitions) -> None:
        self._jobs = jobs
        self._transitions = transitions

    async def PlaceJob(self, request: pb.PlaceJobRequest, context: Context) -> pb.PlaceJobResponse:
        placed = await self._jobs.place(_placement(request), request.timeout_seconds)
        return _placed_to_pb(placed)

    async def SyncWeights(self, request: pb.SyncWeightsRequest, context: Context) -> pb.SyncWeightsResponse:
        report = await self._jobs.sync(
            JobId(request.job_id), request.epoch, request.model, request.version, request.timeout_seconds
        )
        return pb.SyncWeightsResponse(report=_report_to_pb(report))

    async def ReleaseJob(self, request: pb.ReleaseJobRequest, context: Context) -> pb.ReleaseJobResponse:
        await self._transitions.forget(JobId(request.job_id))
        await self._jobs.release(JobId(request.job_id), keep_copies=request.keep_copies)
        return pb.ReleaseJobResponse()

    async def PlanTransition(self, request: pb.PlanTransitionRequest, context: Context) -> pb.PlanTransitionResponse:
        target = plan_from_pb(request.target)
        if request.job_id:
            shown = await self._transitions.show(JobId(request.job_id), target, links=request.links)
        else:
            models = {entry.model.name: _source(entry) for entry in request.models}
            nowhere = Placement(JobId(""), 0, plan_from_pb(request.plan), models, seed=0)
            shown = await self._transitions.show_from(nowhere, target, links=request.links)
        return pb.PlanTransitionResponse(transition=_shown_to_pb(shown))

    async def PrepareTransition(
        self, request: pb.PrepareTransitionRequest, context: Context
    ) -> pb.PrepareTransitionResponse:
        await self._transitions.prepare(
            JobId(request.job_id),
            TransitionId(request.transition_id),
            request.epoch,
            plan_from_pb(request.target),
            request.timeout_seconds,
        )
        return pb.PrepareTransitionResponse()

    async def RunTransition(self, request: pb.RunTransitionRequest, context: Context) -> pb.RunTransitionResponse:
        placed = await self._transitions.run(
            JobId(request.job_id),
            TransitionId(request.transition_id),
            request.epoch,
            request.version,
            request.timeout_seconds,
        )
        return pb.RunTransitionResponse(
            units=[_unit_to_pb(unit) for unit in placed.units],
            epoch=placed.placement.epoch,
            syncs=[_report_to_pb(report) for report in placed.reports],
        )

    async def AbortTransition(self, request: pb.AbortTransitionRequest, context: Context) -> pb.AbortTransitionResponse:
        await self._transitions.abort(JobId(request.job_id), TransitionId(request.transition_id))
        return pb.AbortTransitionResponse()

    async def DigestModelStage(
        self, request: pb.DigestModelStageRequest, context: Context
    ) -> pb.DigestModelStageResponse:
        name = ModelStage.parse(request.model_stage)
        version, found = await self._transitions.digest(JobId(request.job_id), name, time_left(context, DIGEST_SECONDS))
        return pb.DigestModelStageResponse(version=version, digests=digests_to_pb(found))


def _shown_to_pb(shown: Shown) -> transitions_pb2.Transition:
    told = dag_to_pb(shown.dag)
    told.job_id, told.from_epoch = shown.job, shown.epoch
    told.links.extend(
        transitions_pb2.LinkBytes(
            source=str(link.source),
            target=str(link.target),
            phase=str(link.phase),
            bytes=link.bytes,
            distance=LEVELS[link.distance],
        )
        for link in shown.links
    )
    if shown.links:
        told.bytes_needed = sum(link.bytes for link in shown.links)
    told.seconds.update({str(phase): seconds for phase, seconds in shown.seconds.items()})
    return told


def _placement(request: pb.PlaceJobRequest) -> Placement:
    return Placement(
        job=JobId(request.job_id),
        epoch=request.epoch,
        plan=plan_from_pb(request.plan),
        models={entry.model.name: _source(entry) for entry in request.models},
        seed=request.seed,
        version=request.version,
        checkpoint=request.checkpoint,
        from_copies=request.from_copies,
    )


def _source(entry: pb.ModelEngine) -> ModelSource:
    return ModelSource(
        name=entry.model.name,
        path=entry.model.path,
        head=head_from_pb(entry.model),
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
        unit_id=unit.id,
        model_stage=str(unit.unit.model_stage),
        replica=unit.unit.replica,
        service=unit.service,
        epoch=unit.unit.epoch,
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
