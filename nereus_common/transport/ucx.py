"""The UCX transport: what a process offers and pulls, carried by a thread of its own.

calling threads         nereus-transport (asyncio)                nereus-transport-pack
publish, retire ──► Holdings ◄── Server: control sockets, lanes ──► digest, pack
pull ──► collect ◄── mailbox ◄── Puller: links, lanes, staging ring
         digest, sink
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from nereus_common.core.errors import Unavailable
from nereus_common.core.transfer import RankRef
from nereus_common.transport.base import PullReport, PullRequest, Sink, Tensors
from nereus_common.transport.collect import Mailbox, Order, Running, collect
from nereus_common.transport.holdings import Holdings
from nereus_common.transport.lane import Lanes
from nereus_common.transport.pulling import Puller
from nereus_common.transport.serving import Server
from nereus_common.transport.settings import UcxSettings
from nereus_common.transport.thread import LoopThread

_START_SECONDS = 30.0
_SWITCH_SECONDS = 2e-4
"""For the interpreter's lock: while a lane spins, a thread that has digested a chunk would wait 5 ms for it."""


class UcxTransport:
    """See `Transport`. Start it in the process that holds the bytes, after any fork."""

    def __init__(self, settings: UcxSettings | None = None) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self._settings = settings or UcxSettings()
        self._holdings = Holdings()
        self._packer = ThreadPoolExecutor(1, "nereus-transport-pack")
        self._lanes = Lanes()
        self._server = Server(self._holdings, self._settings, self._lanes, self._packer)
        self._thread = LoopThread("nereus-transport")
        self._closed = False
        self._puller, self._address = self._thread.submit(self._open()).result(_START_SECONDS)

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def stranded_bytes(self) -> int:
        """Staging memory lost to peers that died or hung in the middle of a message."""
        return self._puller.ring.stranded_bytes + self._server.ring.stranded_bytes

    def publish(self, holder: RankRef, version: int, tensors: Tensors) -> None:
        self._holdings.publish(holder, version, tensors)

    def retire(self, version_below: int, *, timeout: float) -> None:
        self._holdings.retire(version_below, timeout)

    def withdraw(self, holder: RankRef, *, timeout: float) -> bool:
        return self._holdings.withdraw(holder, timeout)

    def pull(self, request: PullRequest, sink: Sink) -> PullReport:
        return collect(request, sink, self, self._settings.chunk_bytes)

    async def async_pull(self, request: PullRequest, sink: Sink) -> PullReport:
        return await asyncio.to_thread(self.pull, request, sink)

    def start(self, order: Order, mailbox: Mailbox) -> Running:
        """See `Mover`."""
        if self._closed:
            raise Unavailable("this process has closed its transport", transition=order.request.transition)
        return self._thread.submit(self._puller.fetch(order, mailbox))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        limit = self._settings.grace + _START_SECONDS
        self._thread.submit(self._shut()).result(limit)
        self._thread.stop(limit)
        self._packer.shutdown()

    async def _open(self) -> tuple[Puller, bytes]:
        return Puller(self._settings, self._lanes), (await self._server.start()).encode()

    async def _shut(self) -> None:
        await self._puller.close()
        await self._server.close()
        self._lanes.close()
