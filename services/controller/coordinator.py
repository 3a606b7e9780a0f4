"""The coordinator, seen from the controller."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from nereus.spec import JobSpec
from nereus.v1 import coordinator_pb2 as pb
from nereus.v1 import transitions_pb2, units_pb2
from nereus.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from nereus_common.core.ids import JobId, ModelStage, Stage
from nereus_common.core.plan import Plan
from nereus_common.registry import TransitionRecord
from nereus_common.rpc import calling
from nereus_common.rpc.convert import digests_from_pb, plan_to_pb
from nereus_common.rpc.pool import Channels

from .placed import PlacedJob, PlacedStage, PlacedUnit
from .synced import Synced

MARGIN = 5.0
"""Seconds by which an RPC outlives the deadline inside it, so that the inner, more telling error arrives."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """`target` of its gRPC server behind `channel`."""

    target: str
    channel: grpc.aio.Channel

    @property
    def _stub(self) -> CoordinatorServiceStub:
        return CoordinatorServiceStub(self.channel)

    async def place(
        self,
        job: JobId,
        epoch: int,
        plan: Plan,
        spec: JobSpec,
        channels: Channels,
        version: int = 0,
        checkpoint: str = "",
        from_copies: bool = False,
    ) -> tuple[PlacedJob, Sequence[Synced]]:
        """Create all units of the plan; returns them with what the first weight syncs moved.

        `checkpoint`: a complete one's folder, which holds the trained models at `version`; "": their model folders.
        `from_copies`: those that `release` left hold `version`; ProcessLost where they do not.
        """
        timeout = spec.deadlines.place
        request = pb.PlaceJobRequest(
            job_id=job,
            epoch=epoch,
            plan=plan_to_pb(plan),
            models=_models(spec, plan),
            timeout_seconds=timeout,
            seed=spec.seed,
            version=version,
            checkpoint=checkpoint,
            from_copies=from_copies,
        )
        with calling("PlaceJob", self.target):
            answer = await self._stub.PlaceJob(request, timeout=timeout + MARGIN)
        return _placed(answer.units, plan, channels), [_synced(report) for report in answer.syncs]

    async def sync(self, job: JobId, epoch: int, model: str, version: int, timeout: float) -> Synced:
        request = pb.SyncWeightsRequest(job_id=job, epoch=epoch, model=model, version=version, timeout_seconds=timeout)
        with calling("SyncWeights", self.target):
            answer = await self._stub.SyncWeights(request, timeout=timeout + MARGIN)
        return _synced(answer.report)

    async def plan_transition(
        self, job: JobId, target: Plan, timeout: float, *, links: bool = False
    ) -> transitions_pb2.Transition:
        """What moving the job to `target` would do, with what crosses which `links` if they are asked for.
        ResourceExhausted names the device and the bytes."""
        request = pb.PlanTransitionRequest(job_id=job, target=plan_to_pb(target), links=links)
        with calling("PlanTransition", self.target):
            return (await self._stub.PlanTransition(request, timeout=timeout)).transition

    async def plan_transition_from(
        self, spec: JobSpec, plan: Plan, target: Plan, timeout: float
    ) -> transitions_pb2.Transition:
        """The same from `plan`, of a job that is not placed, with the links."""
        request = pb.PlanTransitionRequest(
            target=plan_to_pb(target), plan=plan_to_pb(plan), models=_models(spec, plan), links=True
        )
        with calling("PlanTransition", self.target):
            return (await self._stub.PlanTransition(request, timeout=timeout)).transition

    async def prepare_transition(self, record: TransitionRecord, timeout: float) -> None:
        """Start what can be started beside the running job; what fails is undone."""
        request = pb.PrepareTransitionRequest(
            transition_id=record.id,
            job_id=record.job,
            epoch=record.from_epoch,
            target=plan_to_pb(record.target),
            timeout_seconds=timeout,
        )
        with calling("PrepareTransition", self.target):
            await self._stub.PrepareTransition(request, timeout=timeout + MARGIN)

    async def run_transition(
        self, record: TransitionRecord, version: int, channels: Channels, timeout: float
    ) -> tuple[PlacedJob, int, Sequence[Synced]]:
        """Move the job; returns its units, its plan epoch and what the weight syncs moved.

        What fails within `timeout` seconds is undone within as many.
        """
        request = pb.RunTransitionRequest(
            transition_id=record.id,
            job_id=record.job,
            epoch=record.from_epoch,
            version=version,
            timeout_seconds=timeout,
        )
        with calling("RunTransition", self.target):
            answer = await self._stub.RunTransition(request, timeout=2 * timeout + MARGIN)
        placed = _placed(answer.units, record.target, channels)
        return placed, answer.epoch, [_synced(report) for report in answer.syncs]

    async def abort_transition(self, record: TransitionRecord, timeout: float) -> None:
        request = pb.AbortTransitionRequest(transition_id=record.id, job_id=record.job)
        with calling("AbortTransition", self.target):
            await self._stub.AbortTransition(request, timeout=timeout)

    async def digest(self, job: JobId, name: ModelStage, timeout: float) -> tuple[int, Mapping[str, int]]:
        """Version and, by kind, digest of what a model-stage holds."""
        request = pb.DigestModelStageRequest(job_id=job, model_stage=str(name))
        with calling("DigestModelStage", self.target):
            answer = await self._stub.DigestModelStage(request, timeout=timeout)
        return answer.version, digests_from_pb(answer.digests)

    async def release(self, job: JobId, timeout: float, *, keep_copies: bool = False) -> None:
        """`keep_copies`: leave what copies of the trained models' state there are, for a placement `from_copies`."""
        request = pb.ReleaseJobRequest(job_id=job, keep_copies=keep_copies)
        with calling("ReleaseJob", self.target):
            await self._stub.ReleaseJob(request, timeout=timeout)


def _models(spec: JobSpec, plan: Plan) -> list[pb.ModelEngine]:
    return [_model(spec, name) for name in sorted({stage.model for stage in plan.names})]


def _model(spec: JobSpec, name: str) -> pb.ModelEngine:
    model = spec.model(name)
    options = {str(stage): dict(engine.options) for stage, engine in model.engines.items()}
    training = options.setdefault(str(Stage.TRAINING), {})
    training.setdefault("optimizer", _optimizer(spec))
    training.setdefault("redundancy", spec.redundancy)
    return pb.ModelEngine(
        model=units_pb2.Model(name=name, path=model.path, head=spec.head(name)),
        engines={str(stage): engine.name for stage, engine in model.engines.items()},
        options_json={stage: json.dumps(given) for stage, given in options.items()},
    )


def _optimizer(spec: JobSpec) -> dict[str, float]:
    """The part of the optimizer that is fixed when the engine is built; the rate comes with every step."""
    optimizer = spec.optimizer
    beta1, beta2 = optimizer.betas
    return {"beta1": beta1, "beta2": beta2, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}


def _placed(answer: Iterable[pb.PlacedUnit], plan: Plan, channels: Channels) -> PlacedJob:
    units: dict[ModelStage, list[PlacedUnit]] = {}
    for unit in answer:
        name = ModelStage.parse(unit.model_stage)
        placed = PlacedUnit(unit.unit_id, unit.replica, unit.epoch, unit.service, channels.get(unit.service))
        units.setdefault(name, []).append(placed)
    return {
        name: PlacedStage(name, plan[name], tuple(sorted(found, key=lambda unit: unit.replica)))
        for name, found in units.items()
    }


def _synced(report: pb.SyncReport) -> Synced:
    return Synced(report.model, report.bytes_moved, report.bytes_needed, report.seconds, dict(report.phases))
