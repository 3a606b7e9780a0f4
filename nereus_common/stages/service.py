"""A stage service: registry membership, a table of units, a gRPC server; the same for all three stages."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nereus.v1.units_pb2_grpc import add_UnitServiceServicer_to_server
from nereus_common.config import ServiceSettings
from nereus_common.core.errors import ProcessLost
from nereus_common.core.ids import Stage
from nereus_common.observe import logs
from nereus_common.observe.metrics.page import MetricsPage, metrics_page
from nereus_common.registry import Device, ServiceRecord, open_registry
from nereus_common.registry.membership import membership
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.base import UnitHost, UnitSpec
from nereus_common.stages.servicer import UnitServicer
from nereus_common.stages.units import Units

log = logging.getLogger(__name__)

OnLost = Callable[[ProcessLost], None]
MakeHost = Callable[[UnitSpec, OnLost], UnitHost]


async def serve_stage(
    settings: ServiceSettings, stage: Stage, make_host: MakeHost, add_work: Callable[[RpcServer, Units], None]
) -> None:
    """Serve until a signal. `add_work` adds the stage's own servicer to the server."""
    logs.configure(settings.name, file=settings.log_path)
    units = Units(lambda spec: make_host(spec, _losing(spec)))

    def _losing(spec: UnitSpec) -> OnLost:
        return lambda lost: units.note_loss(spec.unit, lost)

    server = RpcServer(settings.name, settings.host, settings.port)
    server.add(add_UnitServiceServicer_to_server, UnitServicer(units))
    add_work(server, units)
    devices = [Device(one.id(settings.node), one.kind, one.memory_bytes) for one in settings.devices]
    async with (
        metrics_page(settings.name, settings.host, settings.metrics_port) as page,
        await open_registry(settings.registry_url or "") as registry,
    ):
        await server.start()
        async with membership(registry, service_record(settings, stage, server, page), devices):
            await server.serve(units.release_all, settings.deadlines.drain)


def service_record(
    settings: ServiceSettings, role: str, server: RpcServer, page: MetricsPage | None = None
) -> ServiceRecord:
    """What the registry tells others about a service that listens, and about the page of its metrics."""
    return ServiceRecord(
        name=settings.name,
        role=str(role),
        target=f"{settings.advertise}:{server.port}" if settings.advertise else server.target,
        node=settings.node,
        devices=tuple(device.id(settings.node) for device in settings.devices),
        log=str(settings.log_path.absolute()),
        metrics=page.url_at(settings.advertise) if page else "",
    )
