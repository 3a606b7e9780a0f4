"""Client channels: bounded, kept alive, and with a deadline on every call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from nereus_common.core.errors import InvalidInput, Unavailable
from nereus_common.observe import logs
from nereus_common.rpc.interceptors import SUBJECT_KEY

MESSAGE_BYTES = 64 << 20
"""Of one message; larger things travel as chunks."""
STATUS_BYTES = 64 << 10
DEFAULT_DEADLINE = 60.0

OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", STATUS_BYTES),
    ("grpc.absolute_max_metadata_size", STATUS_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # a target that is back is noticed soon, not after gRPC's two minutes
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class DeadlineChannel(grpc.aio.Channel):
    """A gRPC channel whose calls all have a deadline, `default` seconds where none is given.

    It passes the subject of the caller's logs on. The calls it returns are gRPC's own; wrap them in `errors.calling`.
    """

    def __init__(self, target: str, *, default: float = DEFAULT_DEADLINE) -> None:
        """`target` is host:port; nothing is sent before the first call."""
        host, colon, port = target.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise InvalidInput(f"target {target!r} is not HOST:PORT", remedy="write 127.0.0.1:7001", field="target")
        self.target = target
        self._default = _checked(default)
        # one connection per channel: a killed service's half-dead connection is not shared with a new channel
        self._inner = grpc.aio.insecure_channel(target, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    async def ready(self, timeout: float) -> None:
        """Wait until the target answers; Unavailable after `timeout` seconds."""
        call = self._inner.channel_ready()
        try:
            async with asyncio.timeout(_checked(timeout)):
                await call
        except TimeoutError:
            raise Unavailable(
                f"{self.target} cannot be reached within {timeout:g} s",
                remedy="check that the service runs there",
                target=self.target,
            ) from None

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._bounded(self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._bounded(self._inner.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._bounded(self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._bounded(self._inner.stream_stream(method, *args, **kwargs))

    def _bounded(self, start: Any) -> Callable[..., Any]:
        def call(*args: Any, timeout: float | None = None, metadata: Any = None, **kwargs: Any) -> Any:
            deadline = self._default if timeout is None else _checked(timeout)
            passed_on = [*(metadata or ()), *_metadata(logs.subject())]
            return start(*args, timeout=deadline, metadata=passed_on, **kwargs)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


def _checked(timeout: float) -> float:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise InvalidInput(f"a deadline of {timeout} seconds", remedy="give a positive, finite number", field="timeout")
    return timeout


def _metadata(subject: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(f"{SUBJECT_KEY}{name}", value) for name, value in subject.items()]
