"""A fixed ring of staging buffers, allocated once; takers wait for a free one."""

from __future__ import annotations

import asyncio

import numpy as np

from nereus_common.transport.base import Raw


class StagingRing:
    """`count` buffers of `size` bytes. Lives on one event loop. A buffer is out of the ring from `take` to `give`."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._count = count
        self._free: asyncio.Queue[Raw] = asyncio.Queue()
        self.stranded_bytes = 0

    async def take(self) -> Raw:
        if self._count:  # first use: most processes of a job either only serve or only pull
            for _ in range(self._count):
                self._free.put_nowait(np.empty(self.size, np.uint8))
            self._count = 0
        return await self._free.get()

    def give(self, buffer: Raw) -> None:
        self._free.put_nowait(buffer)

    def strand(self) -> None:
        """Replace a taken buffer that a lost peer's message may still be bound to; it never comes back."""
        self.stranded_bytes += self.size
        self._free.put_nowait(np.empty(self.size, np.uint8))
