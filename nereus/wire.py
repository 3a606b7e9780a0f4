"""The job messages, from protobuf: the only place where the client meets them."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nereus.events import JobEvent, JobState
from nereus.types import ClusterStatus, Device, Job, Sample, Service
from nereus.v1 import jobs_pb2 as pb
from nereus_common.rpc.convert import plan_from_pb

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


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
