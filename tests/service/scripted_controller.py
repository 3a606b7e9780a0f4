"""A controller that follows a script, behind the real server: for tests of the client and the command."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from nereus import JobSpec, errors
from nereus.v1 import jobs_pb2 as pb
from nereus.v1.jobs_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.planning.default import default_plan
from nereus_common.rpc.convert import plan_to_pb
from nereus_common.rpc.server import RpcServer

PLAN = default_plan(
    [DeviceId("node0", "cpu0")], [ModelStage.parse("actor/generation"), ModelStage.parse("actor/training")]
)
STEP = '{"step": 1, "steps": 2, "reward_mean": 0.5, "tokens": 100, "seconds": {"total": 2.0}, "later_field": 1}'

SAMPLES = [
    json.dumps(
        {
            "step": 1,
            "position": 70 + number,
            "sample": 0,
            "prompt": f"{'An example with its answer. ' * 20}What is {number} + 4?",
            "response": response,
            "reward": reward,
            "rewards": {"exact_answer": reward, "format": 0.25},
            "advantage": reward - 0.5,
            "finished": finished,
            "tokens": len(response),
            "versions": [1, 1],
            "turns": 1,
            "later_field": {},
        }
    )
    for number, (response, reward, finished) in enumerate(
        [("The answer is [bold]7[/].", 1.0, True), ("Let me think. " * 10, 0.5, False), ("", 0.0, True)]
    )
]
"""Best reward first; the first response has what looks like markup."""


class ScriptedController(JobServiceServicer):
    """Knows one job at a time; a watch gives three events, and is cut after each of them when `cuts` is set."""

    def __init__(self) -> None:
        self.jobs: dict[str, pb.Job] = {}
        self.cuts = False
        self.failing = False
        self.watches: list[str] = []
        self.resumed: list[tuple[str, int]] = []
        self.told: list[tuple[str, str]] = []
        """More events of a watch, before its last."""

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> pb.SubmitJobResponse:
        JobSpec.from_json(request.spec_json)
        known = self.jobs.get(request.job_id)
        if known is not None and known.spec_json != request.spec_json:
            raise errors.Conflict(f"job {request.job_id} is another", remedy="choose another id")
        job = pb.Job(
            job_id=request.job_id, state=pb.JOB_STATE_RUNNING, spec_json=request.spec_json, plan=plan_to_pb(PLAN)
        )
        job.created.FromSeconds(1_700_000_000)
        self.jobs[request.job_id] = job
        return pb.SubmitJobResponse(job=job)

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        if request.job_id not in self.jobs:
            raise errors.NotFound(f"there is no job {request.job_id}", job=request.job_id)
        return pb.GetJobResponse(job=self.jobs[request.job_id])

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=self.jobs.values())

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        self.jobs[request.job_id].state = pb.JOB_STATE_CANCELLED
        return pb.CancelJobResponse(job=self.jobs[request.job_id])

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        job = self.jobs[request.job_id]
        if job.state == pb.JOB_STATE_RUNNING:
            raise errors.Conflict(f"job {job.job_id} is still running", remedy="cancel it")
        self.resumed.append((request.plan_json, request.steps))
        job.state = pb.JOB_STATE_PENDING
        job.steps_done = job.checkpoint_step = 1
        return pb.ResumeJobResponse(job=job)

    async def GetSamples(self, request: pb.GetSamplesRequest, context: Any) -> pb.GetSamplesResponse:
        if request.step > 1:
            raise errors.NotFound(f"job {request.job_id} has no recorded samples of step {request.step}")
        return pb.GetSamplesResponse(samples_json=SAMPLES[: request.limit or None])

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.WatchJobResponse]:
        self.watches.append(request.after_revision)
        payloads = [
            ("state", '{"state": "running"}'),
            ("step", STEP),
            ("news", "{}"),
            *self.told,
            ("state", '{"state": "succeeded"}'),
        ]
        for revision, (kind, payload) in enumerate(payloads, start=1):
            if revision > int(request.after_revision or 0):
                yield pb.WatchJobResponse(
                    revision=str(revision), time=Timestamp(seconds=revision), kind=kind, payload_json=payload
                )
                if self.cuts:
                    raise errors.ResourceExhausted("read too slowly")
        if request.job_id in self.jobs:
            self.jobs[request.job_id].state = pb.JOB_STATE_FAILED if self.failing else pb.JOB_STATE_SUCCEEDED

    async def GetClusterStatus(self, request: pb.GetClusterStatusRequest, context: Any) -> pb.GetClusterStatusResponse:
        device = pb.Device(id="node0/cpu0", kind="cpu", memory_bytes=10, granted_bytes=4, units=["u"])
        return pb.GetClusterStatusResponse(devices=[device])


@asynccontextmanager
async def scripted_controller() -> AsyncIterator[tuple[ScriptedController, str]]:
    """The controller and its target."""
    scripted = ScriptedController()
    server = RpcServer("controller")
    server.add(add_JobServiceServicer_to_server, scripted)
    await server.start()
    yield scripted, server.target
    await server.stop(0)
