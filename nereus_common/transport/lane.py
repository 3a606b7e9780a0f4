"""A lane: one UCX worker and one endpoint to one peer. The only file that touches ucxx.

Why one worker per peer: within a node the endpoint has no error handling (UCX would fall back to TCP), so a peer that
dies leaves requests that never complete and cannot be cancelled. Giving up its lane gives up exactly those; the lane is
then *stranded*: kept, and never progressed again, so that nothing can write to the buffers its receives are bound to.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from nereus_common.core.errors import Unavailable
from nereus_common.transport.base import Raw

# ucxx sets UCX_MEMTYPE_CACHE on import, and a UCX without GPU support warns about it on stdout.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

_SPINS = 64
"""Fruitless progress calls before a lane with requests under way sleeps until UCX signals."""
_GUARD_SECONDS = 0.05
"""A sleeping lane with requests under way is progressed this often even without a signal."""


class Reach(StrEnum):
    """NODE: shared memory. NETWORK: TCP and whatever faster UCX finds, with its error handling on."""

    NODE = "node"
    NETWORK = "network"


# CMA kills the receiver when the source dies with a send posted, so no lane ever uses it.
TLS: Mapping[Reach, str] = {Reach.NODE: "^cma,tcp", Reach.NETWORK: "^cma,posix,sysv"}


class Lanes:
    """Makes lanes; holds one UCX context per reach. Lives on the transport's loop, as do its lanes."""

    def __init__(self, tls: Mapping[Reach, str] = TLS) -> None:
        self._tls = tls
        self._contexts: dict[Reach, Any] = {}

    def open(self, reach: Reach) -> Lane:
        """A lane of this end; Unavailable when UCX has no usable transport."""
        try:
            if reach not in self._contexts:
                features = (ucx.Feature.TAG, ucx.Feature.WAKEUP)
                self._contexts[reach] = ucx.UCXContext({"TLS": self._tls[reach]}, features)
            return Lane(ucx.UCXWorker(self._contexts[reach]), reach)
        except ucx.UCXError as error:
            raise Unavailable(
                f"UCX cannot start with transports {self._tls[reach]}: {error}", remedy="run `nereus doctor`"
            ) from error

    def close(self) -> None:
        """Let go of the contexts; each ends with its last lane."""
        self._contexts.clear()


class Lane:
    """Tagged messages to and from one peer. Not thread-safe."""

    def __init__(self, worker: Any, reach: Reach) -> None:
        self._worker = worker
        self._reach = reach
        self._endpoint: Any = None
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[Any, asyncio.Future[None], Raw]] = []
        self._idle = 0
        self._turning: asyncio.Handle | None = None
        self._guard: asyncio.Handle | None = None
        worker.init_blocking_progress_mode()
        self.address: bytes = worker.address.tobytes()
        self._fd: int = worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._turn)
        self._turn()

    def connect(self, peer: bytes) -> None:
        """Make the endpoint to the lane whose address is `peer`; Unavailable when no common transport exists."""
        address = ucx.UCXAddress.create_from_buffer(peer)
        try:
            handled = self._reach is Reach.NETWORK
            self._endpoint = self._worker.create_endpoint_from_worker_address(address, handled)
        except ucx.UCXError as error:
            raise Unavailable(
                f"UCX finds no way to the peer within reach {self._reach}: {error}", remedy="run `nereus doctor`"
            ) from error
        self._turn()

    def send(self, data: Raw, tag: int) -> asyncio.Future[None]:
        """Send `data`, which must stay as it is until the future is done. Unavailable when the peer is lost."""
        return self._track(self._endpoint.tag_send(Array(data), ucx.UCXXTag(tag)), data)

    def receive(self, data: Raw, tag: int) -> asyncio.Future[None]:
        """Receive the message with `tag` into `data`, which nobody may read or write until the future is done."""
        return self._track(self._endpoint.tag_recv(Array(data), ucx.UCXXTag(tag)), data)

    @property
    def quiet(self) -> bool:
        """Whether no request is under way."""
        return not self._pending

    def close(self) -> None:
        """Free the lane, or strand it when requests are under way; their futures are cancelled. Idempotent."""
        if self._worker is None:
            return
        self._loop.remove_reader(self._fd)
        for handle in (self._turning, self._guard):
            if handle is not None:
                handle.cancel()
        if self._pending:
            _keep_forever((self._pending, self._endpoint, self._worker))
            for _, future, _ in self._pending:
                future.cancel()
        self._endpoint = self._worker = None
        self._pending = []

    def _track(self, request: Any, data: Raw) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._pending.append((request, future, data))
        self._idle = 0
        self._soon()
        return future

    def _soon(self) -> None:
        if self._turning is None:
            self._turning = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Progress for a while, settle what completed, then come back soon or sleep until UCX signals."""
        if self._turning is not None:
            self._turning.cancel()
            self._turning = None
        for _ in range(_SPINS):
            self._idle = 0 if self._worker.progress_once() else self._idle + 1
        self._settle()
        if (self._pending and self._idle < 2 * _SPINS) or not self._worker.arm():
            self._soon()
        elif self._pending and self._guard is None:
            self._guard = self._loop.call_later(_GUARD_SECONDS, self._on_guard)

    def _on_guard(self) -> None:
        self._guard = None
        self._turn()

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for request, future, data in pending:
            if not request.completed:
                self._pending.append((request, future, data))
                continue
            if future.done():
                continue
            try:
                request.check_error()
            except ucx.UCXError as error:
                future.set_exception(Unavailable(f"the peer was lost: {error}"))
            else:
                future.set_result(None)


def _keep_forever(objects: object) -> None:
    """Destroying a worker whose requests wait for a dead peer is undefined; even at exit it must not happen."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))
