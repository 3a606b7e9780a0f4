"""Stand-ins for tests of what surrounds them; the real parts have tests of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from nereus_common.core.errors import NereusError, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.stages.base import Holding, PullOrder, RankPulled, StateCopies


class Kept:
    """Copies of one version."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def offer(self, version: int, timeout: float) -> Holding:
        if version != self._version:
            raise StaleVersion(f"version {self._version} is kept, not {version}")
        return Holding(version, ())

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        return {"parameters": 9}


class ScriptedHost:
    """A unit without processes: it notes what it is asked, and fails or blocks where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: dict[str, NereusError] = {}
        self.blocked: dict[str, asyncio.Event] = {}
        self.digest_of_rank = 7
        self.digest_of_state = 8
        self.released = asyncio.Event()
        self.copies: StateCopies | None = None

    @property
    def pids(self) -> Sequence[int]:
        return (1, 2)

    async def prepare(self, timeout: float) -> None:
        await self._do("prepare")

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        await self._do("load")

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        await self._do("describe")
        return Holding(-1, ())

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        await self._do("pull")
        return (RankPulled(0, 10, 0.1, self.digest_of_rank),)

    async def verify(self, version: int, wire_dtype: str, timeout: float) -> Mapping[int, int]:
        await self._do("verify")
        return {0: self.digest_of_rank}

    async def commit(self, version: int, timeout: float) -> None:
        await self._do("commit")

    async def sleep(self, timeout: float) -> None:
        await self._do("sleep")

    async def wake(self, timeout: float) -> None:
        await self._do("wake")

    async def offer(self, version: int, timeout: float) -> Holding:
        await self._do("offer")
        return Holding(version, ())

    async def withdraw(self, timeout: float) -> None:
        await self._do("withdraw")

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        await self._do("drop")

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        await self._do("digest")
        return {"parameters": self.digest_of_state}

    async def release(self) -> None:
        await self._do("release")
        self.released.set()

    async def release_ranks(self) -> None:
        self.calls.append("release_ranks")

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.blocked:
            await self.blocked[name].wait()
        if name in self.failures:
            raise self.failures[name]
