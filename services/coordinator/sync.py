"""Weight sync: bring every other unit of a model to the version its training units hold.

The program is compiled once per set of units and replayed every step. All receivers pull and verify before the first
commits, so that either all expose the new version or all stay on the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.core.ids import DeviceId
from nereus_common.core.transfer import RankRef, TransferProgram
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.rpc.together import together
from nereus_common.stages.base import PullOrder, RankPulled
from nereus_common.stages.ranks import by_rank
from nereus_common.state.distance import device_distance
from nereus_common.state.program import bytes_needed, compile_program

from .rates import Measured
from .remote_unit import RemoteUnit


@dataclass(frozen=True, slots=True)
class SyncReport:
    """`bytes_moved` as counted at the transport; `phases` in seconds; `measured`: how fast they came."""

    model: str
    version: int
    bytes_moved: int
    bytes_needed: int
    seconds: float
    phases: Mapping[str, float]
    measured: Sequence[Measured] = ()


@dataclass(slots=True)
class WeightSync:
    """The sync of one model in one plan epoch."""

    model: str
    wire_dtype: str
    sources: Sequence[RemoteUnit]
    receivers: Sequence[RemoteUnit]
    _program: TransferProgram | None = field(default=None, init=False)
    _needed: int = field(default=0, init=False)
    _addresses: dict[RankRef, bytes] = field(default_factory=dict, init=False)
    _distance: dict[RankRef, int] = field(default_factory=dict, init=False)
    """Receiving rank → how far most of its bytes come from."""

    async def run(self, version: int, timeout: float, transition: str) -> SyncReport:
        """Idempotent by version: units that already serve it confirm it. Raises what the receivers raise."""
        started, watch = time.monotonic(), Stopwatch()
        try:
            async with asyncio.timeout(timeout):
                with watch.phase("compile"):
                    await self._compile(timeout)
                with watch.phase("pull"):
                    pulled = await self._pull_all(version, timeout, transition)
                with watch.phase("verify"):
                    await self._verify_all(version, pulled, timeout)
                with watch.phase("commit"):
                    await together(receiver.commit(version, timeout) for receiver in self.receivers)
        except TimeoutError as late:
            names = ", ".join(str(receiver.id) for receiver in self.receivers)
            raise DeadlineExceeded(
                f"sync of {self.model} to version {version} waited {timeout:.0f} s for {names} in phase "
                f"{watch.current}",
                transition=transition,
            ) from late
        moved = sum(rank.bytes for unit in pulled for rank in unit)
        seconds = time.monotonic() - started
        return SyncReport(self.model, version, moved, self._needed, seconds, watch.seconds, self._measured(pulled))

    async def _compile(self, timeout: float) -> None:
        if self._program is not None:
            return
        held = await together(source.describe(timeout) for source in self.sources)
        lacking = await together(receiver.describe(timeout) for receiver in self.receivers)
        sources = by_rank((unit.id for unit in self.sources), held)
        receivers = by_rank((unit.id for unit in self.receivers), lacking)
        targets = {ref: rank.boxes for ref, rank in receivers.items()}
        holders = {ref: rank.boxes for ref, rank in sources.items()}
        places = {ref: DeviceId.parse(rank.device) for ref, rank in (sources | receivers).items()}
        distance = device_distance(places)
        self._program = compile_program(targets, holders, wire_dtype=self.wire_dtype, distance=distance)
        most: dict[RankRef, int] = {}
        for (source, target), size in self._program.bytes_by_link().items():
            if size > most.get(target, 0):
                most[target], self._distance[target] = size, distance(source, target)
        self._needed = bytes_needed(targets, wire_dtype=self.wire_dtype)
        self._addresses = {ref: rank.address for ref, rank in sources.items()}

    async def _pull_all(self, version: int, timeout: float, transition: str) -> list[Sequence[RankPulled]]:
        assert self._program is not None
        orders = [
            PullOrder(
                version=version,
                wire_dtype=self.wire_dtype,
                transfers=[move for move in self._program.transfers if move.target.unit == receiver.id],
                addresses=self._addresses,
                timeout=timeout,
                transition=transition,
            )
            for receiver in self.receivers
        ]
        return await together(receiver.pull(order) for receiver, order in zip(self.receivers, orders, strict=True))

    def _measured(self, pulled: Sequence[Sequence[RankPulled]]) -> list[Measured]:
        return [
            Measured(self._distance[ref], rank.bytes, rank.seconds)
            for receiver, ranks in zip(self.receivers, pulled, strict=True)
            for rank in ranks
            if (ref := RankRef(receiver.id, rank.rank)) in self._distance
        ]

    async def _verify_all(self, version: int, pulled: Sequence[Sequence[RankPulled]], timeout: float) -> None:
        await together(
            receiver.verify(version, self.wire_dtype, {rank.rank: rank.digest for rank in ranks}, timeout)
            for receiver, ranks in zip(self.receivers, pulled, strict=True)
        )
