"""Nereus: RL post-training that changes its parallelism plan while the job runs.

    async with nereus.Client.connect() as client:
        job = await client.submit(nereus.JobSpec(...))

Names are imported when they are first used: `import nereus` loads neither torch nor gRPC nor any service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nereus import errors
    from nereus.client import Client, JobHandle
    from nereus.events import (
        Checkpoint,
        Evaluation,
        JobEvent,
        JobState,
        LogLine,
        Restart,
        StateChange,
        StepReport,
        SyncReport,
        TransitionChange,
    )
    from nereus.spec import JobSpec
    from nereus.spec_file import load_plan, load_spec
    from nereus.sync import SyncClient, SyncJobHandle
    from nereus.transition import StateDigests, Transition
    from nereus.types import ClusterStatus, Device, Job, Sample, Service
    from nereus_common.core.plan import Plan
    from nereus_common.rl.environments import Observation, Task
    from nereus_common.rl.rewards import RewardInput

_WHERE = {
    "Checkpoint": "nereus.events",
    "Client": "nereus.client",
    "ClusterStatus": "nereus.types",
    "Device": "nereus.types",
    "Evaluation": "nereus.events",
    "Job": "nereus.types",
    "JobEvent": "nereus.events",
    "JobHandle": "nereus.client",
    "JobSpec": "nereus.spec",
    "JobState": "nereus.events",
    "LogLine": "nereus.events",
    "Observation": "nereus_common.rl.environments",
    "Plan": "nereus_common.core.plan",
    "RewardInput": "nereus_common.rl.rewards",
    "Restart": "nereus.events",
    "Sample": "nereus.types",
    "Service": "nereus.types",
    "StateChange": "nereus.events",
    "StateDigests": "nereus.transition",
    "StepReport": "nereus.events",
    "SyncClient": "nereus.sync",
    "SyncJobHandle": "nereus.sync",
    "SyncReport": "nereus.events",
    "Task": "nereus_common.rl.environments",
    "Transition": "nereus.transition",
    "TransitionChange": "nereus.events",
    "load_plan": "nereus.spec_file",
    "load_spec": "nereus.spec_file",
}

__all__ = [
    "Checkpoint",
    "Client",
    "ClusterStatus",
    "Device",
    "Evaluation",
    "Job",
    "JobEvent",
    "JobHandle",
    "JobSpec",
    "JobState",
    "LogLine",
    "Observation",
    "Plan",
    "Restart",
    "RewardInput",
    "Sample",
    "Service",
    "StateChange",
    "StateDigests",
    "StepReport",
    "SyncClient",
    "SyncJobHandle",
    "SyncReport",
    "Task",
    "Transition",
    "TransitionChange",
    "errors",
    "load_plan",
    "load_spec",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("nereus.errors")
    if name not in _WHERE:
        raise AttributeError(f"module 'nereus' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
