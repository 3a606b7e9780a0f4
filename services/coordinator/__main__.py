"""`python -m nereus_coordinator [--config FILE]`: owns the units of all jobs. One is active, by lease."""

from __future__ import annotations

import asyncio
import sys

from nereus.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.observe import logs
from nereus_common.observe.metrics import metrics_page
from nereus_common.registry import open_registry
from nereus_common.registry.membership import membership
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.server import RpcServer, run_service
from nereus_common.stages.service import service_record

from .jobs import PlacedJobs
from .ledger import UnitLedger
from .reach import Reach
from .servicer import CoordinatorServicer
from .transitions import Transitions


async def serve(settings: ServiceSettings) -> None:
    logs.configure(settings.name, file=settings.log_path)
    server = RpcServer(settings.name, settings.host, settings.port)
    async with (
        metrics_page(settings.name, settings.host, settings.metrics_port) as page,
        await open_registry(settings.registry_url or "") as registry,
        Channels() as channels,
    ):
        ledger, reach = UnitLedger(registry), Reach(registry, channels)
        jobs = PlacedJobs(ledger, reach)
        transitions = Transitions(jobs, ledger, reach)
        server.add(add_CoordinatorServiceServicer_to_server, CoordinatorServicer(jobs, transitions))
        await server.start()
        record = service_record(settings, "coordinator", server, page)
        async with membership(registry, record, took=ledger.lead):
            await transitions.recover()
            jobs.open()
            await server.serve(lambda: asyncio.sleep(0), settings.deadlines.drain)


if __name__ == "__main__":
    sys.exit(run_service("coordinator", serve))
