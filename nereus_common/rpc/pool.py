"""One channel per target, shared by all who call it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from nereus_common.rpc.channels import DeadlineChannel


class Channels:
    """Opened when first asked for, closed together."""

    def __init__(self) -> None:
        self._open: dict[str, DeadlineChannel] = {}

    def get(self, target: str) -> DeadlineChannel:
        if target not in self._open:
            self._open[target] = DeadlineChannel(target)
        return self._open[target]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._open.values()))
        self._open.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
