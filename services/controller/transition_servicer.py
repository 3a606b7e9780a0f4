"""TransitionService on the wire: nothing but translation."""

from __future__ import annotations

from typing import Any

import grpc.aio

from nereus.spec import JobSpec
from nereus.v1 import transitions_pb2 as pb
from nereus.v1.transitions_pb2_grpc import TransitionServiceServicer
from nereus_common.core.ids import JobId, ModelStage, TransitionId
from nereus_common.registry import TransitionRecord
from nereus_common.rpc.convert import digests_to_pb, plan_from_pb, plan_to_pb
from nereus_common.rpc.transitions import dag_from_json
from nereus_common.transitions.lifecycle import TransitionState

from .servicer import timestamp
from .transitions import TransitionDesk

Context = grpc.aio.ServicerContext[Any, Any]

_STATES = {state: pb.TransitionState.Value(f"TRANSITION_STATE_{state.name}") for state in TransitionState}


class TransitionServicer(TransitionServiceServicer):
    def __init__(self, desk: TransitionDesk) -> None:
        self._desk = desk

    async def ShowTransition(self, request: pb.ShowTransitionRequest, context: Context) -> pb.ShowTransitionResponse:
        target = plan_from_pb(request.target)
        if request.job_id:
            shown = await self._desk.show(JobId(request.job_id), target)
        else:
            shown = await self._desk.show_from(JobSpec.from_json(request.spec_json), target)
        return pb.ShowTransitionResponse(transition=shown)

    async def ApplyTransition(self, request: pb.ApplyTransitionRequest, context: Context) -> pb.ApplyTransitionResponse:
        record = await self._desk.apply(JobId(request.job_id), plan_from_pb(request.target), request.transition_id)
        return pb.ApplyTransitionResponse(transition=record_to_pb(record))

    async def GetTransition(self, request: pb.GetTransitionRequest, context: Context) -> pb.GetTransitionResponse:
        record = await self._desk.get(JobId(request.job_id), TransitionId(request.transition_id))
        return pb.GetTransitionResponse(transition=record_to_pb(record))

    async def ListTransitions(self, request: pb.ListTransitionsRequest, context: Context) -> pb.ListTransitionsResponse:
        records = await self._desk.list(JobId(request.job_id))
        return pb.ListTransitionsResponse(transitions=[record_to_pb(record) for record in records])

    async def DigestModelState(
        self, request: pb.DigestModelStateRequest, context: Context
    ) -> pb.DigestModelStateResponse:
        version, found = await self._desk.digest(JobId(request.job_id), ModelStage.parse(request.model_stage))
        return pb.DigestModelStateResponse(version=version, digests=digests_to_pb(found))


def record_to_pb(record: TransitionRecord) -> pb.Transition:
    """The DAG as it was planned, with what has become of it."""
    told = dag_from_json(record.dag_json)
    for node, state in zip(told.nodes, record.nodes, strict=False):
        node.state = str(state)
    told.MergeFrom(
        pb.Transition(
            transition_id=record.id,
            job_id=record.job,
            state=_STATES[record.state],
            from_epoch=record.from_epoch,
            bytes_moved=record.bytes_moved,
            seconds=dict(record.seconds),
            error_reason=record.error_reason,
            error_message=record.error_message,
            created=timestamp(record.created),
        )
    )
    told.plan.CopyFrom(plan_to_pb(record.plan))
    told.target.CopyFrom(plan_to_pb(record.target))
    told.step = record.step
    if record.bytes_needed:
        told.bytes_needed = record.bytes_needed  # as measured, not as planned
    if record.ended is not None:
        told.ended.CopyFrom(timestamp(record.ended))
    return told
