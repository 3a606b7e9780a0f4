"""Moving the whole state of a model-stage from its old units to new ones, over UCX, in place at both ends.

shadow     offer ► pull all ► compare digests                      the old units stay whole
in-place   offer ► (pull a round ► note it durably ► drop it)* ► compare digests

The sources are digested while the first round is pulled, which is before anything of them is dropped.

A round is some whole tensors, of which no target receives more than a bucket. Its chunks are compared by digest as they
arrive, because their source is dropped next; in a shadow move, where both sides are whole at the end, only both wholes
are. What fails leaves the offers open: the caller withdraws them, or, where something was dropped, moves the other way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nereus_common.core.errors import DeadlineExceeded, VerificationFailed
from nereus_common.core.ids import DeviceId, TensorName, UnitId
from nereus_common.core.transfer import Box, RankRef
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.rpc.together import together
from nereus_common.stages.base import Holding, PullOrder, RankHolding, RankPulled, state_holder
from nereus_common.stages.ranks import by_rank
from nereus_common.state.boxes import elements
from nereus_common.state.distance import device_distance
from nereus_common.state.program import BUCKET_BYTES, bytes_needed, compile_program
from nereus_common.transitions.dag import Mode
from nereus_common.transitions.rounds import Round, in_place_rounds

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
    expected: Digests | None = None,
    refill: bool = False,
    wire_dtype: str = WIRE_DTYPE,
    bucket_bytes: int = BUCKET_BYTES,
) -> MoveReport:
    """Fill `targets` with `version` of what `sources` hold between them, and prove it; see the module.

    `after_round(n)` makes durable that round n has arrived; nothing of it is dropped before that returns. `expected`:
    what `agreed_digests` says of the sources, where it is known already. `refill`: the targets are drained units that
    hold parts of the version, as in the reverse of a move that was stopped: give what was expected of them then.

    VerificationFailed when a target does not hold what the sources held; DeadlineExceeded names the phase; and whatever
    the units raise.
    """
    end = time.monotonic() + timeout
    move = _Move(sources, targets, version, mode, transition, wire_dtype, bucket_bytes, refill, end)
    try:
        async with asyncio.timeout(timeout):
            return await move.run(after_round, expected)
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


@dataclass(slots=True)
class _Move:
    sources: Sequence[StateUnit]
    targets: Sequence[StateUnit]
    version: int
    mode: Mode
    transition: str
    wire_dtype: str
    bucket_bytes: int
    refill: bool
    end: float
    watch: Stopwatch = field(default_factory=Stopwatch)
    kept: Mapping[RankRef, Mapping[TensorName, Sequence[Box]]] = field(default_factory=dict)
    moved: int = 0

    async def run(self, after_round: AfterRound, expected: Digests | None) -> MoveReport:
        with self.watch.phase("offer"):
            offers = await together(unit.offer(self.version, self._left) for unit in self.sources)
            wanted = await together(unit.describe(self._left, state=True) for unit in self.targets)
            if self.refill:
                kept = await together(unit.offer(self.version, self._left) for unit in self.targets)
                self.kept = _boxes(self.targets, kept)
        with self.watch.phase("compile"):
            rounds = self._rounds(offers, wanted)
            addresses = {ref: rank.address for ref, rank in self._holders(offers).items()}
        for one in rounds:
            with self.watch.phase("pull"):
                pull = self._pull(one, addresses, more=one is not rounds[-1])
                if expected is None:
                    expected = await self._digested_beside(pull)
                else:
                    await pull
            with self.watch.phase("note"):
                await after_round(one.number)
            if self.mode is Mode.IN_PLACE:
                with self.watch.phase("drop"):
                    await together(unit.drop(one.tensors, self._left) for unit in self.sources)
        with self.watch.phase("digest"):
            digests = expected or await agreed_digests(self.sources, self.version, self._left)
            await self._verify(digests)
        needed = bytes_needed(_boxes(self.targets, wanted), held=self.kept, wire_dtype=self.wire_dtype)
        return MoveReport(self.moved, needed, len(rounds), digests, self.watch.seconds)

    async def _digested_beside(self, pull: Coroutine[None, None, None]) -> Digests:
        """The sources' digests, made while `pull` runs; sources that are about to be dropped are still whole."""
        found: list[Digests] = []

        async def digest() -> None:
            found.append(await agreed_digests(self.sources, self.version, self._left))

        await together((pull, digest()))
        return found[0]

    def _rounds(self, offers: Sequence[Holding], wanted: Sequence[Holding]) -> tuple[Round, ...]:
        """What is pulled before the next is; a shadow move is one round."""
        sources = self._holders(offers)
        targets = by_rank((unit.id for unit in self.targets), wanted)
        devices = {ref: DeviceId.parse(rank.device) for ref, rank in (sources | targets).items()}
        offered = {ref: rank.boxes for ref, rank in sources.items()}
        program = compile_program(
            _boxes(self.targets, wanted),
            offered,
            held=self.kept,
            wire_dtype=self.wire_dtype,
            distance=device_distance(devices),
            bucket_bytes=self.bucket_bytes,
        )
        if self.mode is Mode.SHADOW:
            return (Round(0, (), {unit.id: program.for_unit(unit.id) for unit in self.targets}),)
        held = {
            ref: {name: program.item_bytes * elements(region) for name, region in boxes.items()}
            for ref, boxes in offered.items()
        }
        return in_place_rounds(program, held, devices, bucket_bytes=self.bucket_bytes)

    def _holders(self, offers: Sequence[Holding]) -> dict[RankRef, RankHolding]:
        return by_rank((state_holder(unit.id) for unit in self.sources), offers)

    async def _pull(self, one: Round, addresses: Mapping[RankRef, bytes], more: bool) -> None:
        orders = [
            PullOrder(
                version=self.version,
                wire_dtype=self.wire_dtype,
                transfers=one.transfers.get(unit.id, ()),
                addresses=addresses,
                timeout=self._left,
                transition=self.transition,
                state=True,
                more=more,
                compared_whole=self.mode is Mode.SHADOW,
            )
            for unit in self.targets
        ]
        pulled = await together(unit.pull(order) for unit, order in zip(self.targets, orders, strict=True))
        self.moved += sum(rank.bytes for ranks in pulled for rank in ranks)

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
    return {ref: rank.boxes for ref, rank in by_rank((unit.id for unit in units), holdings).items()}


def _check_equal(unit: UnitId, found: Digests, expected: Digests, version: int) -> None:
    wrong = sorted(kind for kind in found.keys() | expected.keys() if found.get(kind) != expected.get(kind))
    if wrong:
        raise VerificationFailed(
            f"unit {unit}: {', '.join(wrong)} of version {version} are not what the other units hold",
            remedy="the unit is not to be used; the old units, where they are whole, still are",
            unit=unit,
            version=version,
        )
