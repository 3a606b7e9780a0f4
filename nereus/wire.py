"""The job messages, from protobuf: the only place where the client meets them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nereus.events import JobEvent, JobState
from nereus.transition import Transition, TransitionEdge, TransitionLink, TransitionNode
from nereus.types import ClusterStatus, Device, Job, Sample, Service
from nereus.v1 import jobs_pb2 as pb
from nereus.v1 import transitions_pb2
from nereus_common.rpc.convert import plan_from_pb
from nereus_common.transitions.lifecycle import TransitionState

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


def job_from_pb(job: pb.Job) -> Job:
    return Job(
        id=job.job_id,
        state=state_from_pb(job.state),
        spec_json=job.spec_json,
        plan=plan_from_pb(job.plan) if job.HasField("plan") else None,
        epoch=job.epoch,
        steps_done=job.steps_done,
        error_reason=job.error_reason,
        error_message=job.error_message,
        error_log=tuple(job.error_log),
        created=_time(job.created) if job.HasField("created") else None,
        ended=_time(job.ended) if job.HasField("ended") else None,
        folder=job.folder,
        checkpoint_step=job.checkpoint_step,
    )


def state_from_pb(state: pb.JobState.ValueType) -> JobState:
    return JobState(pb.JobState.Name(state).removeprefix("JOB_STATE_").lower())


def event_from_pb(event: pb.WatchJobResponse) -> JobEvent:
    return JobEvent(event.revision, _time(event.time), event.kind, json.loads(event.payload_json))


def sample_from_json(text: str) -> Sample:
    """Fields that this version does not know are left out."""
    known = {entry.name for entry in fields(Sample)}
    data = {key: value for key, value in json.loads(text).items() if key in known}
    return Sample(**{**data, "versions": tuple(data.get("versions", ()))})


def cluster_from_pb(status: pb.GetClusterStatusResponse) -> ClusterStatus:
    return ClusterStatus(
        devices=tuple(
            Device(device.id, device.kind, device.memory_bytes, device.granted_bytes, tuple(device.units))
            for device in status.devices
        ),
        services=tuple(
            Service(service.name, service.target, service.node, service.alive) for service in status.services
        ),
    )


def transition_from_pb(told: transitions_pb2.Transition) -> Transition:
    unknown = told.state == transitions_pb2.TRANSITION_STATE_UNSPECIFIED
    name = transitions_pb2.TransitionState.Name(told.state).removeprefix("TRANSITION_STATE_").lower()
    return Transition(
        id=told.transition_id,
        job=told.job_id,
        state=None if unknown else TransitionState(name),
        from_epoch=told.from_epoch,
        plan=plan_from_pb(told.plan),
        target=plan_from_pb(told.target),
        nodes=tuple(_node(node) for node in told.nodes),
        edges=tuple(TransitionEdge(edge.before, edge.after, edge.kind) for edge in told.edges),
        peaks=_bytes(told.peaks),
        budgets=_bytes(told.budgets),
        bytes_moved=told.bytes_moved,
        bytes_needed=told.bytes_needed,
        seconds=dict(told.seconds),
        step=told.step,
        error_reason=told.error_reason,
        error_message=told.error_message,
        created=_time(told.created) if told.HasField("created") else None,
        ended=_time(told.ended) if told.HasField("ended") else None,
        links=tuple(
            TransitionLink(link.source, link.target, link.phase, link.bytes, link.distance) for link in told.links
        ),
    )


def _node(node: transitions_pb2.TransitionNode) -> TransitionNode:
    return TransitionNode(
        id=node.id,
        primitive=node.primitive,
        model_stage=node.model_stage,
        old_replicas=tuple(node.old_replicas),
        new_replicas=tuple(node.new_replicas),
        mode=node.mode,
        bytes=node.bytes,
        acquires=_bytes(node.acquires),
        frees=_bytes(node.frees),
        state=node.state,
    )


def _bytes(of: Iterable[transitions_pb2.DeviceBytes]) -> dict[str, int]:
    return {one.device: one.bytes for one in of}


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
