"""The gRPC server of a service: health, reflection, error mapping, a bounded size, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from nereus_common.config import ServiceSettings
from nereus_common.core.errors import InvalidInput, NereusError, ResourceExhausted
from nereus_common.rpc.channels import OPTIONS
from nereus_common.rpc.interceptors import Boundary

_log = logging.getLogger(__name__)
_SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second server on the port is silently given half of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),  # on a machine that stalls, pings arrive in bunches: no reason to hang up
    ("grpc.keepalive_permit_without_calls", 1),
)
MAX_CONCURRENT = 4096
"""Calls under way at once; more are refused with RESOURCE_EXHAUSTED."""
Servicer = TypeVar("Servicer")


class RpcServer:
    """Build, `add` servicers, `start`, and either `stop` it or `serve` until a signal."""

    def __init__(self, name: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on `host`: loopback unless told otherwise. `port` 0 picks a free one."""
        self.name = name
        self._host = host
        self._port = port
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[Boundary()], options=list(_SERVER_OPTIONS), maximum_concurrent_rpcs=MAX_CONCURRENT
        )
        self._register = _Register(self._server)

    @property
    def target(self) -> str:
        """host:port, as clients on this node write it; the port is known after `start`."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def add(self, register: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer) -> None:
        """Serve `servicer`: `add(add_JobServiceServicer_to_server, jobs)`. Before `start` only."""
        register(servicer, cast("grpc.aio.Server", self._register))

    async def start(self) -> None:
        """Bind and serve. ResourceExhausted when the port is taken, InvalidInput when the host is not ours."""
        served = list(self._register.services)
        add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*served, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._port = self._bind()
        await self._server.start()
        for name in [health.OVERALL_HEALTH, *served]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        _log.info("%s listens on %s", self.name, self.target)

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, give those under way `grace` seconds, cancel the rest."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def serve(self, drain: Callable[[], Awaitable[None]], grace: float) -> None:
        """Serve a started server until SIGTERM or SIGINT, then `drain`, then stop. A second signal exits at once.

        `drain` runs while calls are still answered; it and the stop after it take at most `grace` seconds each.
        """
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hear(number: signal.Signals) -> None:
            if asked.is_set():
                _log.warning("%s: second %s, leaving at once", self.name, number.name)
                os._exit(128 + number)
            _log.info("%s: %s, draining", self.name, number.name)
            asked.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, hear, number)
        await asked.wait()
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace):
                await drain()
        except TimeoutError:
            _log.error("%s did not drain within %g s; stopping anyway", self.name, grace)
        finally:
            await self.stop(grace)

    def _bind(self) -> int:
        try:
            return self._server.add_insecure_port(self.target)
        except RuntimeError as failed:
            raise _why_not(self.name, self._host, self._port) from failed


class _Register:
    """Takes what generated code registers on a server, and notes the services' full names."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.services: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self.services.append(service)
        self._server.add_registered_method_handlers(service, handlers)


def _why_not(name: str, host: str, port: int) -> NereusError:
    """gRPC says only that it failed: ask the kernel."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as refused:
        if refused.errno == errno.EADDRINUSE:
            return ResourceExhausted(
                f"{name}: port {port} on {host} is taken",
                remedy=f"stop what listens there (`ss -ltnp sport = :{port}`), or set another port; 0 picks a free one",
                port=port,
                host=host,
            )
        return InvalidInput(
            f"{name} cannot listen on {host}:{port}: {refused}", remedy="use an address of this node", field="host"
        )
    return ResourceExhausted(f"{name}: port {port} on {host} was taken a moment ago", remedy="try again", port=port)


def run_service(name: str, serve: Callable[[ServiceSettings], Coroutine[Any, Any, None]]) -> int:
    """A service's `main`: settings from the command line and the environment, then `serve`; the exit status.

    2 where the settings are wrong, said in one line.
    """
    try:
        settings = ServiceSettings.from_argv(sys.argv[1:], os.environ)
    except NereusError as wrong:
        print(f"{name}: {wrong}", file=sys.stderr)
        return 2
    return run(serve(settings), settings.name)


def run(main: Coroutine[Any, Any, None], name: str) -> int:
    """Run a service's main coroutine under uvloop; the exit status. A NereusError ends it in one line, not a trace."""
    try:
        uvloop.run(main)
    except NereusError as error:
        _log.error("%s: %s", name, error)
        return 1
    except BaseExceptionGroup as group:
        expected, bugs = group.split(NereusError)
        if expected is None or bugs is not None:
            raise
        for leaf in _leaves(expected):
            _log.error("%s: %s", name, leaf)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
