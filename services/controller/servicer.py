"""JobService on the wire: nothing but translation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from nereus.v1 import jobs_pb2 as pb
from nereus.v1.jobs_pb2_grpc import JobServiceServicer
from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import JobId
from nereus_common.registry import JobRecord, JobState, Registry
from nereus_common.rpc.convert import plan_to_pb

from .jobs import Jobs

Context = grpc.aio.ServicerContext[Any, Any]

_STATES = {
    JobState.PENDING: pb.JOB_STATE_PENDING,
    JobState.PLACING: pb.JOB_STATE_PLACING,
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.SUCCEEDED: pb.JOB_STATE_SUCCEEDED,
    JobState.FAILED: pb.JOB_STATE_FAILED,
    JobState.CANCELLED: pb.JOB_STATE_CANCELLED,
}


class JobServicer(JobServiceServicer):
    def __init__(self, jobs: Jobs, registry: Registry) -> None:
        self._jobs = jobs
        self._registry = registry

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Context) -> pb.SubmitJobResponse:
        record = await self._jobs.submit(JobId(request.job_id), request.spec_json)
        return pb.SubmitJobResponse(job=await self._job_to_pb(record))

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=await self._job_to_pb(await self._jobs.get(JobId(request.job_id))))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=[await self._job_to_pb(record) for record in await self._jobs.list()])

    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.CancelJobResponse:
        return pb.CancelJobResponse(job=await self._job_to_pb(await self._jobs.cancel(JobId(request.job_id))))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Context) -> AsyncIterator[pb.WatchJobResponse]:
        async for event in self._jobs.watch(JobId(request.job_id), _revision(request.after_revision)):
            yield pb.WatchJobResponse(
                revision=str(event.revision),
                time=timestamp(event.time),
                kind=event.kind,
                payload_json=event.payload_json,
            )

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.ResumeJobResponse:
        record = await self._jobs.resume(JobId(request.job_id), request.plan_json, request.steps)
        return pb.ResumeJobResponse(job=await self._job_to_pb(record))

    async def GetSamples(self, request: pb.GetSamplesRequest, context: Context) -> pb.GetSamplesResponse:
        found = await self._jobs.samples(JobId(request.job_id), request.step, request.limit)
        return pb.GetSamplesResponse(samples_json=[json.dumps(sample) for sample in found])

    async def GetClusterStatus(
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        grants = await self._registry.grants()
        devices = await self._registry.devices()
        services = await self._registry.services()
        return pb.GetClusterStatusResponse(
            devices=[
                pb.Device(
                    id=str(device.id),
                    kind=device.kind,
                    memory_bytes=device.memory_bytes,
                    granted_bytes=sum(grant.bytes for grant in grants if grant.device == device.id),
                    units=sorted({grant.unit for grant in grants if grant.device == device.id}),
                )
                for device in devices
            ],
            services=[
                pb.ServiceStatus(
                    name=status.service.name,
                    target=status.service.target,
                    node=status.service.node,
                    alive=status.alive,
                )
                for status in services
            ],
        )

    async def _job_to_pb(self, record: JobRecord) -> pb.Job:
        job = pb.Job(
            job_id=record.id,
            state=_STATES[record.state],
            spec_json=record.spec_json,
            steps_done=record.steps_done,
            error_reason=record.error_reason,
            error_message=record.error_message,
            error_log=record.error_log,
            created=timestamp(record.created),
            folder=record.folder,
            checkpoint_step=record.checkpoint_step,
        )
        if record.ended is not None:
            job.ended.CopyFrom(timestamp(record.ended))
        try:
            committed = await self._registry.get_plan(record.id)
        except NotFound:
            return job  # not placed yet
        job.epoch = committed.epoch
        job.plan.CopyFrom(plan_to_pb(committed.plan))
        return job


def timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _revision(text: str) -> int:
    if text and not text.isdigit():
        raise InvalidInput(f"after_revision {text!r} is not a revision of this job", field="after_revision")
    return int(text or 0)
