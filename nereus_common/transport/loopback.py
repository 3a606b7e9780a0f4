"""The in-memory twin of the UCX transport: same laws, threads of one process instead of a wire.

A process-wide directory maps addresses to open transports. Closing one is its death: running pulls from it fail.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import ClassVar

import numpy as np

from nereus_common.core.errors import NereusError
from nereus_common.core.transfer import RankRef
from nereus_common.transport.base import PullReport, PullRequest, Sink, Tensors
from nereus_common.transport.chunking import payload
from nereus_common.transport.collect import (
    Arrived,
    Failed,
    Finished,
    Mailbox,
    Order,
    collect,
)
from nereus_common.transport.failures import deadline_exceeded, unavailable
from nereus_common.transport.holdings import Holdings

_CHUNK_BYTES = 4 << 20
_WINDOW = 4


class LoopbackTransport:
    """See `Transport`. `chunk_bytes`: the size of a staging buffer."""

    _open: ClassVar[dict[bytes, LoopbackTransport]] = {}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self.address = f"loopback:{next(self._numbers)}".encode()
        self._chunk_bytes = chunk_bytes
        self.holdings = Holdings()
        self._open[self.address] = self

    def publish(self, holder: RankRef, version: int, tensors: Tensors) -> None:
        self.holdings.publish(holder, version, tensors)

    def retire(self, version_below: int, *, timeout: float) -> None:
        self.holdings.retire(version_below, timeout)

    def withdraw(self, holder: RankRef, *, timeout: float) -> bool:
        return self.holdings.withdraw(holder, timeout)

    def pull(self, request: PullRequest, sink: Sink) -> PullReport:
        return collect(request, sink, self, self._chunk_bytes)

    async def async_pull(self, request: PullRequest, sink: Sink) -> PullReport:
        return await asyncio.to_thread(self.pull, request, sink)

    def start(self, order: Order, mailbox: Mailbox) -> _Carrier:
        carrier = _Carrier(order, mailbox, self._chunk_bytes)
        carrier.thread.start()
        return carrier

    def close(self) -> None:
        self._open.pop(self.address, None)

    @classmethod
    def at(cls, address: bytes) -> LoopbackTransport | None:
        return cls._open.get(address)


class _Carrier:
    """One assignment, carried by a thread through a window of staging buffers."""

    def __init__(self, order: Order, mailbox: Mailbox, chunk_bytes: int) -> None:
        self._order = order
        self._mailbox = mailbox
        self._chunk_bytes = chunk_bytes
        self._free = threading.Semaphore(_WINDOW)
        self._cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, name="nereus-loopback", daemon=True)

    def cancel(self) -> None:
        self._cancelled.set()
        self._free.release()

    def _run(self) -> None:
        assignment = self._order.assignment
        try:
            self._carry()
        except NereusError as error:
            self._mailbox.put(Failed(assignment, error))
        else:
            self._mailbox.put(Finished(assignment))

    def _carry(self) -> None:
        assignment, request = self._order.assignment, self._order.request
        with self._source().holdings.pin(assignment.holder.rank, request.version) as pin:
            for number, chunk in enumerate(assignment.chunks):
                if not self._free.acquire(timeout=max(self._order.deadline - time.monotonic(), 0)):
                    raise deadline_exceeded(request, str(assignment.holder.rank), request.deadline)
                if self._cancelled.is_set():
                    return
                staging = np.empty(chunk.nbytes, np.uint8)
                data, digest = payload(chunk, pin.view, request.item_bytes, staging, digest=request.checked)
                np.copyto(staging, data)
                self._source()
                pin.check()
                checked = digest if request.checked else None
                self._mailbox.put(Arrived(assignment, number, staging, checked, self._free.release))

    def _source(self) -> LoopbackTransport:
        """The transport that holds the bytes, as long as it lives."""
        holder, request = self._order.assignment.holder, self._order.request
        source = LoopbackTransport.at(holder.address)
        if source is None:
            raise unavailable(request, holder.rank, "its transport is closed")
        return source
