"""The page that Prometheus reads: /metrics of one process, over HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from nereus_common.core.errors import InvalidInput, NereusError, ResourceExhausted

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Where the page is."""

    host: str
    port: int

    def url_at(self, advertised: str | None = None) -> str:
        """Its address by the host that others reach it by, where that is not the one it listens on."""
        host = advertised or self.host
        return f"http://[{host}]:{self.port}/metrics" if ":" in host else f"http://{host}:{self.port}/metrics"


@asynccontextmanager
async def metrics_page(
    name: str, host: str, port: int | None, registry: CollectorRegistry = REGISTRY
) -> AsyncIterator[MetricsPage | None]:
    """Serve `registry` while the block runs, on threads of its own; port 0 takes a free one, None serves nothing.

    `name`: the service's, for the log. ResourceExhausted when the port is taken, InvalidInput when the host is not
    one of this node.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as refused:
        raise _why_not(name, host, port, refused) from refused
    page = MetricsPage(host, server.server_port)
    log.info("%s shows its metrics on %s", name, page.url_at())
    try:
        yield page
    finally:
        await asyncio.to_thread(server.shutdown)  # returns when the thread has seen it, half a second at most
        server.server_close()
        thread.join(STOP_SECONDS)


def _why_not(name: str, host: str, port: int, refused: OSError) -> NereusError:
    if refused.errno == errno.EADDRINUSE:
        return ResourceExhausted(
            f"{name}: port {port} on {host}, for its metrics, is taken",
            remedy=f"stop what listens there (`ss -ltnp sport = :{port}`), or set another metrics_port; 0 finds one",
            port=port,
            host=host,
        )
    return InvalidInput(
        f"{name} cannot show its metrics on {host}:{port}: {refused}",
        remedy="use an address of this node",
        field="host",
    )
