"""`python -m nereus_controller [--config FILE]`: accepts jobs and runs their RL loops."""

from __future__ import annotations

import asyncio
import sys

from nereus.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from nereus.v1.transitions_pb2_grpc import add_TransitionServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.observe import logs
from nereus_common.observe.metrics import JobMetrics, metrics_page
from nereus_common.registry import open_registry
from nereus_common.registry.membership import membership
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.server import RpcServer, run_service
from nereus_common.stages.service import service_record

from .jobs import Jobs
from .servicer import JobServicer
from .surroundings import Surroundings
from .transition_servicer import TransitionServicer
from .transitions import TransitionDesk


async def serve(settings: ServiceSettings) -> None:
    logs.configure(settings.name, file=settings.log_path)
    server = RpcServer(settings.name, settings.host, settings.port)
    async with (
        metrics_page(settings.name, settings.host, settings.metrics_port) as page,
        await open_registry(settings.registry_url or "") as registry,
        Channels() as channels,
        asyncio.TaskGroup() as tasks,
    ):
        around = Surroundings(registry, channels, settings.data_dir / "jobs", JobMetrics())
        jobs = Jobs(around, tasks)
        server.add(add_JobServiceServicer_to_server, JobServicer(jobs, registry))
        server.add(add_TransitionServiceServicer_to_server, TransitionServicer(TransitionDesk(around)))
        await server.start()
        async with membership(registry, service_record(settings, "controller", server, page)):
            await jobs.recover()
            await server.serve(jobs.close, settings.deadlines.drain)


if __name__ == "__main__":
    sys.exit(run_service("controller", serve))
