"""Frames over a socketpair: a small header, a pickle, and large buffers beside it, copied once by the kernel.

kind u8 | call u64 | pickle bytes u64 | buffers u32 | bytes of each buffer u64 … | pickle | buffers …
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("<BQQI")
_IN_BAND = 1 << 16
"""Buffers below this many bytes travel inside the pickle: cheaper than a write of their own."""


class Kind(IntEnum):
    # parent to child
    BUILD = 1
    CALL = 2
    STREAM = 3
    CREDIT = 4
    CANCEL = 5
    STOP = 6
    # child to parent
    VALUE = 10
    ITEM = 11
    END = 12
    FAILED = 13


@dataclass(frozen=True, slots=True)
class Frame:
    """A message whose content is still pickled, so that a content that cannot be read concerns its call alone."""

    kind: Kind
    call: int
    pickled: bytes | bytearray = b""
    buffers: tuple[bytearray | memoryview, ...] = ()

    @classmethod
    def of(cls, kind: Kind, call: int, value: Any) -> Frame:
        """Raises whatever pickling raises."""
        buffers: list[memoryview] = []

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _IN_BAND:
                return True
            buffers.append(raw)
            return False

        pickled = pickle.dumps(value, protocol=5, buffer_callback=keep_in_band)
        return cls(kind, call, pickled, tuple(buffers))

    def value(self) -> Any:
        return pickle.loads(self.pickled, buffers=self.buffers)


class Channel:
    """One end of the socketpair, in one event loop. Frames never interleave, however a sender is cancelled."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turn = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    async def send(self, frame: Frame) -> None:
        """Return once the kernel has every byte: the frame's arrays may then be changed. ConnectionError at its end."""
        write = self.post(frame)
        await asyncio.wait([write])  # a sender that is cancelled leaves its frame to be finished
        if write.cancelled():
            raise ConnectionAbortedError("the channel was closed")
        write.result()

    def post(self, frame: Frame) -> asyncio.Task[None]:
        """Send without waiting: for a word that must get out while its caller is being cancelled."""
        write = asyncio.create_task(self._write(frame))
        self._writes.add(write)
        write.add_done_callback(self._written)
        return write

    async def receive(self) -> Frame | None:
        """The next frame, or None at the end of the connection."""
        header = bytearray(_HEADER.size)
        if not await self._fill(header):
            return None
        kind, call, size, count = _HEADER.unpack(header)
        lengths = bytearray(8 * count)
        pickled = bytearray(size)
        await self._fill(lengths)
        await self._fill(pickled)
        buffers = tuple(bytearray(length) for length in struct.unpack(f"<{count}Q", lengths))
        whole = all([await self._fill(buffer) for buffer in buffers])
        return Frame(Kind(kind), call, pickled, buffers) if whole else None

    async def close(self) -> None:
        """Drop what is still being sent. No `receive` may be waiting: its descriptor would be someone else's next."""
        for write in self._writes:
            write.cancel()
        if self._writes:
            await asyncio.wait(self._writes)
        self._sock.close()

    async def _write(self, frame: Frame) -> None:
        loop = asyncio.get_running_loop()
        lengths = [len(buffer) for buffer in frame.buffers]
        head = _HEADER.pack(frame.kind, frame.call, len(frame.pickled), len(lengths))
        async with self._turn:
            await loop.sock_sendall(self._sock, head + struct.pack(f"<{len(lengths)}Q", *lengths) + frame.pickled)
            for buffer in frame.buffers:
                await loop.sock_sendall(self._sock, buffer)

    def _written(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled():
            write.exception()  # seen by the sender; one that was cancelled leaves it to the reader to find the end

    async def _fill(self, target: bytearray) -> bool:
        """Read until `target` is full; False where the connection ended first."""
        loop = asyncio.get_running_loop()
        view = memoryview(target)
        while view:
            try:
                got = await loop.sock_recv_into(self._sock, view)
            except ConnectionResetError:
                return False
            if not got:
                return False
            view = view[got:]
        return True
