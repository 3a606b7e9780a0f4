"""A move of state over recording units: what is done beside what, and what only after what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from nereus_coordinator.moving import move_state

from nereus_common.core.errors import InvalidInput, NereusError, VerificationFailed
from nereus_common.core.ids import TensorName, UnitId
from nereus_common.core.transfer import Box
from nereus_common.stages.base import Holding, PullOrder, RankHolding, RankPulled
from nereus_common.transitions.dag import Mode

pytestmark = pytest.mark.fast

BOXES = {TensorName(name): (Box((0,), (8,)),) for name in ("a", "b", "c")}
ROUND_BYTES = 4 * 8
"""One tensor."""


@dataclass
class Recorded:
    """A unit of one rank that notes every call; `meet` holds its digest and its pull until both have begun."""

    name: str
    log: list[str]
    digests: Mapping[str, int] = field(default_factory=lambda: {"parameters": 5})
    meet: asyncio.Barrier | None = None
    failure: NereusError | None = None

    @property
    def id(self) -> UnitId:
        return UnitId(f"job.actor.training.{self.name}")

    async def offer(self, version: int, timeout: float) -> Holding:
        return await self.describe(timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        return Holding(1, (RankHolding(0, "node0/cpu0", b"", BOXES),))

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        await self._met()
        if self.failure is not None:
            raise self.failure
        self.log.append("pull " + "".join(move.tensor for move in order.transfers))
        return [RankPulled(0, 4 * sum(move.box.elements for move in order.transfers), 0.0, 0)]

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        self.log.append("drop " + "".join(tensors))

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        await self._met()
        self.log.append(f"digest {self.name}")
        return self.digests

    async def _met(self) -> None:
        if self.meet is not None:
            meet, self.meet = self.meet, None
            await meet.wait()


async def run(old: Recorded, new: Recorded, mode: Mode, **more: object) -> None:
    async def note(number: int) -> None:
        old.log.append(f"note {number}")

    options = {"timeout": 5.0, "after_round": note, "bucket_bytes": ROUND_BYTES, **more}
    await move_state([old], [new], 1, mode=mode, transition="t1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_sources_are_digested_while_the_first_round_is_pulled(mode: Mode) -> None:
    meet, log = asyncio.Barrier(2), list[str]()
    await run(Recorded("old", log, meet=meet), Recorded("new", log, meet=meet), mode)
    assert log.count("digest old") == log.count("digest new") == 1
    assert log[-1] == "digest new"


async def test_nothing_is_dropped_before_its_digest_is_known_and_its_round_is_noted() -> None:
    log: list[str] = []
    await run(Recorded("old", log), Recorded("new", log), Mode.IN_PLACE)
    assert log.index("digest old") < log.index("note 0")
    rounds = [f"{what} {given}" for n, name in enumerate("abc") for what, given in (("note", n), ("drop", name))]
    assert [line for line in log if line.split()[0] in ("note", "drop")] == rounds


async def test_targets_that_do_not_hold_what_the_sources_held_are_refused() -> None:
    log: list[str] = []
    with pytest.raises(VerificationFailed, match=r"new: parameters of version 1"):
        await run(Recorded("old", log), Recorded("new", log, digests={"parameters": 6}), Mode.SHADOW)


async def test_a_pull_that_fails_is_told_and_ends_the_digest_beside_it() -> None:
    log: list[str] = []
    broken = InvalidInput("no such box", field="transfers")
    with pytest.raises(InvalidInput, match="no such box"):
        await run(Recorded("old", log, meet=asyncio.Barrier(2)), Recorded("new", log, failure=broken), Mode.SHADOW)
    assert log == []
