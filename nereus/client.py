"""The asynchronous client of a controller."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
import grpc.aio

from nereus.cluster.config import default_data_dir
from nereus.cluster.state import ClusterFolder
from nereus.events import JobEvent
from nereus.models import with_local_models
from nereus.spec import JobSpec
from nereus.spec.moves import merge_target
from nereus.spec_file import load_plan, load_spec, read_mapping
from nereus.transition import StateDigests, Transition
from nereus.types import ClusterStatus, Job, Sample
from nereus.v1 import jobs_pb2 as pb
from nereus.v1 import transitions_pb2
from nereus.v1.jobs_pb2_grpc import JobServiceStub
from nereus.v1.transitions_pb2_grpc import TransitionServiceStub
from nereus.wire import cluster_from_pb, event_from_pb, job_from_pb, sample_from_json, transition_from_pb
from nereus_common.core.errors import Conflict, DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from nereus_common.core.plan import Plan, plan_from_dict
from nereus_common.rpc.channels import DeadlineChannel
from nereus_common.rpc.convert import digests_from_pb, plan_to_pb
from nereus_common.rpc.errors import calling

TARGET_VARIABLE = "NEREUS_TARGET"
REMEDY = "is it running? `nereus up` starts a cluster here, `nereus status` shows it"

WATCH_SECONDS = 600.0
"""After which a watch is opened anew, where it stopped: no call is without a deadline."""
CANCEL_SECONDS = 300.0
"""For a cancelled job to give its devices back."""

PlanSource: TypeAlias = Plan | Mapping[str, Any] | Path | str
"""A plan as a value, as in a job file, or as a file."""

TargetSource: TypeAlias = Plan | Mapping[str, Any] | Path | str
"""A whole plan as a value, or what is to change of the plan in force: as a value or as a file."""

FOLLOW_SECONDS = 0.25
DIGEST_SECONDS = 180.0

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


def find_target(data_dir: Path | None = None) -> str:
    """$NEREUS_TARGET, else the controller of the cluster in the data directory; Unavailable when there is neither."""
    if named := os.environ.get(TARGET_VARIABLE):
        return named
    try:
        return ClusterFolder(data_dir or default_data_dir()).require().controller
    except NotFound as missing:
        raise Unavailable(missing.message, remedy=REMEDY) from missing


class Client:
    """Use as `async with Client.connect() as client`. `timeout`: seconds for each call that is not a watch.

    Every method raises the NereusError that the controller raised, and Unavailable when it cannot be reached.
    """

    def __init__(self, channel: DeadlineChannel, models: Path) -> None:
        self._channel = channel
        self._stub = JobServiceStub(channel)
        self._moves = TransitionServiceStub(channel)
        self._models = models

    @classmethod
    def connect(cls, target: str | None = None, *, data_dir: Path | None = None, timeout: float = 60.0) -> Self:
        """A client of the controller at `target`, by default that of the cluster in the data directory."""
        folder = ClusterFolder(data_dir or default_data_dir())
        return cls(DeadlineChannel(target or find_target(folder.path), default=timeout), folder.models)

    @property
    def target(self) -> str:
        return self._channel.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def submit(self, job: JobSpec | Mapping[str, Any] | Path | str, *, job_id: str | None = None) -> JobHandle:
        """Start a job given as a spec, as its dict form or as a file. InvalidInput names the field that is wrong.

        Submitting the same spec under the same `job_id` again gives the same job; another spec is a Conflict.
        """
        spec = await asyncio.to_thread(self._prepared, job)
        chosen = job_id or f"{spec.name}-{uuid.uuid4().hex[:8]}"
        request = pb.SubmitJobRequest(job_id=chosen, spec_json=spec.to_json())
        answer = await self._call(self._stub.SubmitJob, request, "SubmitJob")
        return JobHandle(self, answer.job.job_id)

    async def get(self, job_id: str) -> Job:
        """NotFound when there is no such job."""
        return job_from_pb((await self._call(self._stub.GetJob, pb.GetJobRequest(job_id=job_id), "GetJob")).job)

    async def list(self) -> tuple[Job, ...]:
        answer = await self._call(self._stub.ListJobs, pb.ListJobsRequest(), "ListJobs")
        return tuple(job_from_pb(job) for job in answer.jobs)

    async def cancel(self, job_id: str) -> Job:
        """Stop a job; return it when it has ended and its devices are free."""
        request = pb.CancelJobRequest(job_id=job_id)
        return job_from_pb((await self._call(self._stub.CancelJob, request, "CancelJob", CANCEL_SECONDS)).job)

    async def resume(self, job_id: str, *, plan: PlanSource | None = None, steps: int | None = None) -> Job:
        """Run an ended job on from its last complete checkpoint, under the same id.

        `plan`: another plan than it had, as a value, as in a job file, or as a file. `steps`: another number in all.
        Conflict while the job runs, NotFound without a checkpoint, InvalidInput for a plan or steps it cannot have.
        """
        chosen = None if plan is None else await asyncio.to_thread(_plan, plan)
        request = pb.ResumeJobRequest(job_id=job_id, plan_json=chosen.to_json() if chosen else "", steps=steps or 0)
        return job_from_pb((await self._call(self._stub.ResumeJob, request, "ResumeJob")).job)

    async def samples(self, job_id: str, *, step: int | None = None, limit: int = 0) -> tuple[Sample, ...]:
        """Recorded samples of a step (from 0; None: the last that has any), best reward first. `limit` 0: all.

        NotFound when the step has none.
        """
        request = pb.GetSamplesRequest(job_id=job_id, step=-1 if step is None else step, limit=limit)
        answer = await self._call(self._stub.GetSamples, request, "GetSamples")
        return tuple(sample_from_json(text) for text in answer.samples_json)

    async def show_transition(self, job: str | JobSpec | Path, target: TargetSource) -> Transition:
        """What moving a job to `target` would do: a dry run. ResourceExhausted names device and bytes.

        `job`: the id of a running one, or a spec or file with a plan, as it would be placed on this cluster. `target`:
        a plan, or the fields of the job's plan that are to change, as a value or as a file.
        """
        if isinstance(job, str):
            plan = await self._target(job, target)
            request = transitions_pb2.ShowTransitionRequest(job_id=job, target=plan_to_pb(plan))
        else:
            spec = await asyncio.to_thread(self._prepared, job)
            plan = await _merged(spec.written_plan, target)
            request = transitions_pb2.ShowTransitionRequest(spec_json=spec.to_json(), target=plan_to_pb(plan))
        return transition_from_pb((await self._call(self._moves.ShowTransition, request, "ShowTransition")).transition)

    async def apply_transition(self, job_id: str, target: TargetSource, *, transition_id: str = "") -> Transition:
        """Move a running job to `target` at its next safe boundary; returns once that is recorded.

        The same target under the same `transition_id` again gives the same transition. Errors as `show_transition`.
        """
        plan = await self._target(job_id, target)
        request = transitions_pb2.ApplyTransitionRequest(
            transition_id=transition_id, job_id=job_id, target=plan_to_pb(plan)
        )
        answer = await self._call(self._moves.ApplyTransition, request, "ApplyTransition")
        return transition_from_pb(answer.transition)

    async def transition(self, job_id: str, transition_id: str) -> Transition:
        """NotFound when there is no such transition."""
        request = transitions_pb2.GetTransitionRequest(job_id=job_id, transition_id=transition_id)
        return transition_from_pb((await self._call(self._moves.GetTransition, request, "GetTransition")).transition)

    async def transitions(self, job_id: str) -> tuple[Transition, ...]:
        """Of a job, oldest first."""
        request = transitions_pb2.ListTransitionsRequest(job_id=job_id)
        answer = await self._call(self._moves.ListTransitions, request, "ListTransitions")
        return tuple(transition_from_pb(one) for one in answer.transitions)

    async def follow_transition(self, job_id: str, transition_id: str) -> AsyncIterator[Transition]:
        """The transition whenever it has changed, up to its end."""
        last = None
        while last is None or not last.has_ended:
            now = await self.transition(job_id, transition_id)
            if now != last:
                yield now
            last = now
            await asyncio.sleep(0 if now.has_ended else FOLLOW_SECONDS)

    async def state_digest(self, job_id: str, model_stage: str) -> StateDigests:
        """Of what a model-stage of a running job holds; the same before and after any transition."""
        request = transitions_pb2.DigestModelStateRequest(job_id=job_id, model_stage=model_stage)
        answer = await self._call(self._moves.DigestModelState, request, "DigestModelState", DIGEST_SECONDS)
        return StateDigests(answer.version, digests_from_pb(answer.digests))

    async def _target(self, job_id: str, given: TargetSource) -> Plan:
        if isinstance(given, Plan):
            return given
        job = await self.get(job_id)
        if job.plan is None:
            raise Conflict(f"job {job_id} is {job.state} and has no plan yet", remedy="wait until it runs", job=job_id)
        return await _merged(job.plan, given)

    async def cluster_status(self) -> ClusterStatus:
        return cluster_from_pb(
            await self._call(self._stub.GetClusterStatus, pb.GetClusterStatusRequest(), "GetClusterStatus")
        )

    async def watch(self, job_id: str, *, after: str = "") -> AsyncIterator[JobEvent]:
        """The job's events after revision `after`, then new ones as they come, until it has ended.

        A watch that the controller closed because it was read too slowly goes on where it stopped.
        """
        while True:
            before = after
            request = pb.WatchJobRequest(job_id=job_id, after_revision=after)
            try:
                with self._calling("WatchJob"):
                    async for message in self._stub.WatchJob(request, timeout=WATCH_SECONDS):
                        after = message.revision
                        yield event_from_pb(message)
                return
            except DeadlineExceeded:
                continue
            except ResourceExhausted:
                if after == before:
                    raise

    def job(self, job_id: str) -> JobHandle:
        """A handle to a job that was submitted earlier."""
        return JobHandle(self, job_id)

    def _prepared(self, job: JobSpec | Mapping[str, Any] | Path | str) -> JobSpec:
        match job:
            case JobSpec():
                spec = job
            case Path() | str():
                spec = load_spec(job)
            case _:
                spec = JobSpec.from_dict(job)
        return with_local_models(spec, self._models)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        name: str,
        timeout: float | None = None,
    ) -> ResponseT:
        with self._calling(name):
            return await method(request, timeout=timeout)

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        try:
            with calling(name, f"the controller at {self.target}"):
                yield
        except Unavailable as error:
            raise Unavailable(error.message, remedy=REMEDY, **error.details) from error


class JobHandle:
    """A job and the client to ask about it."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    async def get(self) -> Job:
        return await self._client.get(self.id)

    def watch(self, *, after: str = "") -> AsyncIterator[JobEvent]:
        return self._client.watch(self.id, after=after)

    async def cancel(self) -> Job:
        return await self._client.cancel(self.id)

    async def resume(self, *, plan: PlanSource | None = None, steps: int | None = None) -> Job:
        return await self._client.resume(self.id, plan=plan, steps=steps)

    async def samples(self, *, step: int | None = None, limit: int = 0) -> tuple[Sample, ...]:
        return await self._client.samples(self.id, step=step, limit=limit)

    async def show_transition(self, target: TargetSource) -> Transition:
        return await self._client.show_transition(self.id, target)

    async def apply_transition(self, target: TargetSource, *, transition_id: str = "") -> Transition:
        return await self._client.apply_transition(self.id, target, transition_id=transition_id)

    async def transition(self, transition_id: str) -> Transition:
        return await self._client.transition(self.id, transition_id)

    async def transitions(self) -> tuple[Transition, ...]:
        return await self._client.transitions(self.id)

    def follow_transition(self, transition_id: str) -> AsyncIterator[Transition]:
        return self._client.follow_transition(self.id, transition_id)

    async def state_digest(self, model_stage: str) -> StateDigests:
        return await self._client.state_digest(self.id, model_stage)

    async def wait(self) -> Job:
        """Return the job when it has ended; JobFailed, with the reason and the end of a log, when it failed."""
        async for _ in self.watch():
            pass
        return (await self.get()).check()


async def _merged(plan: Plan, given: TargetSource) -> Plan:
    if isinstance(given, Plan):
        return given
    fields = given if isinstance(given, Mapping) else await asyncio.to_thread(read_mapping, Path(given), "plan")
    return merge_target(plan, fields.get("plan", fields))


def _plan(given: PlanSource) -> Plan:
    match given:
        case Plan():
            return given
        case Path() | str():
            return load_plan(given)
        case _:
            return plan_from_dict(dict(given))
