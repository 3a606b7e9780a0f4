"""Moving the whole state of a model-stage from its old units to new ones, over UCX, in place at both ends.

shadow     offer ► pull all ► compare digests                      the old units stay whole
in-place   offer ► (pull a round ► note it durably ► drop it)* ► compare digests

A round is a run of whole tensors, of which no target receives more than a bucket. What fails leaves the offers open:
the caller withdraws them, goes on from the first round that was not noted, or moves the other way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, VerificationFailed
from nereus_common.core.ids import DeviceId, TensorName, UnitId
from nereus_common.core.transfer import Box, RankRef, Transfer
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.rpc.together import together
from nereus_common.stages.base import Holding, PullOrder, RankPulled, state_holder
from nereus_common.state.dtypes import item_bytes
from nereus_common.state.program import BUCKET_BYTES, bytes_needed, compile_program, device_distance
from nereus_common.transitions.dag import Mode

WIRE_DTYPE = "float32"
"""In which training state is held."""

AfterRound = Callable[[int], Awaitable[None]]
Digests = Mapping[str, int]


class StateUnit(Protocol):
    """What a move asks of a unit; `RemoteUnit` is one. All timeouts in seconds."""

    @property
    def id(self) -> UnitId: ...
    async def offer(self, version: int, timeout: float) -> Holding: ...
    async def describe(self, timeout: float, state: bool = False) -> Holding: ...
    async def pull(self, order: PullOrder) -> Sequence[RankPulled]: ...
    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None: ...
    async def digest(self, version: int, timeout: float) -> Digests: ...


@dataclass(frozen=True, slots=True)
class MoveReport:
    """`bytes_moved` as counted at the transport, in this call; `bytes_needed` of the whole move. `seconds` by phase."""

    bytes_moved: int
    bytes_needed: int
    rounds: int
    digests: Digests
    seconds: Mapping[str, float]


async def move_state(
    sources: Sequence[StateUnit],
    targets: Sequence[StateUnit],
    version: int,
    *,
    mode: Mode,
    transition: str,
    timeout: float,
    after_round: AfterRound,
    first_round: int = 0,
    expected: Digests | None = None,
    refill: bool = False,
    rounds: Sequence[Sequence[TensorName]] | None = None,
    wire_dtype: str = WIRE_DTYPE,
    bucket_bytes: int = BUCKET_BYTES,
) -> MoveReport:
    """Fill `targets` with `version` of what `sources` hold between them, and prove it; see the module.

    `after_round(n)` makes durable that round n has arrived; nothing of it is dropped before that returns. To go on with
    a move, give the number of the first round that is not noted, and as `expected` what `agreed_digests` said of the
    sources while they were whole. `refill`: the targets are drained units that hold parts of the version, as in the
    reverse of a move that was stopped. `rounds`: tensors by round, for in-place moves; else `rounds_of` cuts them.

    VerificationFailed when a target does not hold what the sources held; DeadlineExceeded names the phase; and whatever
    the units raise.
    """
    move = _Move(sources, targets, version, transition, wire_dtype, bucket_bytes, refill, time.monotonic() + timeout)
    try:
        async with asyncio.timeout(timeout):
            return await move.run(mode, after_round, first_round, expected, rounds)
    except TimeoutError as late:
        names = ", ".join(str(unit.id) for unit in targets)
        raise DeadlineExceeded(
            f"transition {transition}: moving version {version} to {names} was not done in {timeout:.0f} s; "
            f"it was in phase {move.watch.current}",
            transition=transition,
        ) from late


async def agreed_digests(units: Sequence[StateUnit], version: int, timeout: float) -> Digests:
    """The digests that all these units have; VerificationFailed when they do not hold the same state."""
    first, *others = await together(unit.digest(version, timeout) for unit in units)
    for unit, digests in zip(units[1:], others, strict=True):
        _check_equal(unit.id, digests, first, version)
    return first


def rounds_of(targets: Sequence[Holding], size: int, bucket_bytes: int) -> list[list[TensorName]]:
    """All tensors in model order, cut so that no target rank receives more than a bucket in a round, one tensor
    excepted that is larger itself. `size`: bytes per element. It depends on the targets alone."""
    ranks = [rank.boxes for holding in targets for rank in holding.ranks]
    rounds: list[list[TensorName]] = []
    fill = [0] * len(ranks)
    for name in dict.fromkeys(name for boxes in ranks for name in boxes):
        added = [size * sum(box.elements for box in boxes.get(name, ())) for boxes in ranks]
        if not rounds or any(a + b > bucket_bytes for a, b in zip(fill, added, strict=True)):
            rounds.append([])
            fill = [0] * len(ranks)
        rounds[-1].append(name)
        fill = [a + b for a, b in zip(fill, added, strict=True)]
    return rounds


@dataclass(slots=True)
class _Move:
    sources: Sequence[StateUnit]
    targets: Sequence[StateUnit]
    version: int
    transition: str
    wire_dtype: str
    bucket_bytes: int
    refill: bool
    end: float
    watch: Stopwatch = field(default_factory=Stopwatch)
    kept: Mapping[RankRef, Mapping[TensorName, Sequence[Box]]] = field(default_factory=dict)
    moved: int = 0

    async def run(
        self,
        mode: Mode,
        after_round: AfterRound,
        first_round: int,
        expected: Digests | None,
        rounds: Sequence[Sequence[TensorName]] | None,
    ) -> MoveReport:
        with self.watch.phase("offer"):
            offers = await together(unit.offer(self.version, self._left) for unit in self.sources)
            wanted = await together(unit.describe(self._left, state=True) for unit in self.targets)
            if self.refill:
                kept = await together(unit.offer(self.version, self._left) for unit in self.targets)
                self.kept = _boxes(self.targets, kept)
        with self.watch.phase("digest"):
            digests = expected or await self._source_digests(first_round)
        with self.watch.phase("compile"):
            parts = list(rounds) if rounds else self._rounds(mode, wanted)
            program = self._compile(offers, wanted, {name for part in parts[first_round:] for name in part})
        in_place = mode is Mode.IN_PLACE
        if in_place and first_round:
            with self.watch.phase("drop"):
                await self._drop([name for part in parts[:first_round] for name in part])
        for number in range(first_round, len(parts)):
            with self.watch.phase("pull"):
                await self._pull(program, offers, set(parts[number]), more=number < len(parts) - 1)
            with self.watch.phase("note"):
                await after_round(number)
            if in_place:
                with self.watch.phase("drop"):
                    await self._drop(parts[number])
        with self.watch.phase("digest"):
            await self._verify(digests)
        needed = bytes_needed(_boxes(self.targets, wanted), held=self.kept, wire_dtype=self.wire_dtype)
        return MoveReport(self.moved, needed, len(parts), digests, self.watch.seconds)

    async def _source_digests(self, first_round: int) -> Digests:
        if first_round:
            raise InvalidInput(
                f"transition {self.transition} goes on at round {first_round}: its sources are not whole any more",
                remedy="give the digests that were taken before the first round",
                field="expected",
            )
        return await agreed_digests(self.sources, self.version, self._left)

    def _rounds(self, mode: Mode, wanted: Sequence[Holding]) -> list[list[TensorName]]:
        if mode is Mode.IN_PLACE:
            return rounds_of(wanted, item_bytes(self.wire_dtype), self.bucket_bytes)
        return [list(dict.fromkeys(name for unit in wanted for rank in unit.ranks for name in rank.boxes))]

    def _compile(
        self, offers: Sequence[Holding], wanted: Sequence[Holding], names: set[TensorName]
    ) -> Sequence[Transfer]:
        holders = [state_holder(unit.id) for unit in self.sources]
        places = {
            RankRef(holder, rank.rank): DeviceId.parse(rank.device)
            for holder, holding in zip([*holders, *(unit.id for unit in self.targets)], [*offers, *wanted], strict=True)
            for rank in holding.ranks
        }
        offered = {
            RankRef(holder, rank.rank): rank.boxes
            for holder, holding in zip(holders, offers, strict=True)
            for rank in holding.ranks
        }
        lacking = {
            ref: {name: region for name, region in boxes.items() if name in names}
            for ref, boxes in _boxes(self.targets, wanted).items()
        }
        return compile_program(
            lacking,
            offered,
            held=self.kept,
            wire_dtype=self.wire_dtype,
            distance=device_distance(places),
            bucket_bytes=self.bucket_bytes,
        ).transfers

    async def _pull(
        self, program: Sequence[Transfer], offers: Sequence[Holding], names: set[TensorName], more: bool
    ) -> None:
        addresses = {
            RankRef(state_holder(unit.id), rank.rank): rank.address
            for unit, holding in zip(self.sources, offers, strict=True)
            for rank in holding.ranks
        }
        orders = [
            PullOrder(
                version=self.version,
                wire_dtype=self.wire_dtype,
                transfers=[move for move in program if move.target.unit == unit.id and move.tensor in names],
                addresses=addresses,
                timeout=self._left,
                transition=self.transition,
                state=True,
                more=more,
            )
            for unit in self.targets
        ]
        pulled = await together(unit.pull(order) for unit, order in zip(self.targets, orders, strict=True))
        self.moved += sum(rank.bytes for ranks in pulled for rank in ranks)

    async def _drop(self, tensors: Sequence[TensorName]) -> None:
        await together(unit.drop(tensors, self._left) for unit in self.sources)

    async def _verify(self, expected: Digests) -> None:
        found = await together(unit.digest(self.version, self._left) for unit in self.targets)
        for unit, digests in zip(self.targets, found, strict=True):
            _check_equal(unit.id, digests, expected, self.version)

    @property
    def _left(self) -> float:
        return max(self.end - time.monotonic(), 0.001)


def _boxes(
    units: Sequence[StateUnit], holdings: Sequence[Holding]
) -> dict[RankRef, Mapping[TensorName, Sequence[Box]]]:
    return {
        RankRef(unit.id, rank.rank): rank.boxes
        for unit, holding in zip(units, holdings, strict=True)
        for rank in holding.ranks
    }


def _check_equal(unit: UnitId, found: Digests, expected: Digests, version: int) -> None:
    wrong = sorted(kind for kind in found.keys() | expected.keys() if found.get(kind) != expected.get(kind))
    if wrong:
        raise VerificationFailed(
            f"unit {unit}: {', '.join(wrong)} of version {version} are not what the other units hold",
            remedy="the unit is not to be used; the old units, where they are whole, still are",
            unit=unit,
            version=version,
        )
