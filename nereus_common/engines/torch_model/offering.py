"""A rank's whole state in the transport: offered in place under a holder of its own, taken back, and pulled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nereus_common.core.errors import DeadlineExceeded
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.engines.torch_model.answers import RankHolding, RankPull
from nereus_common.engines.torch_model.live import Served
from nereus_common.transport.base import PullReport, PullRequest, Raw, Transport


class StateEngine(Protocol):
    """The engine of a rank whose state moves; see `LiveState`, to which most of it leads."""

    def offer(self, version: int) -> Mapping[TensorName, Sequence[tuple[Box, Served]]]: ...
    def withdraw(self) -> None: ...
    def drop(self, tensors: Iterable[TensorName]) -> None: ...
    def lacking(self, version: int, asked: Sequence[tuple[TensorName, Box]]) -> Sequence[tuple[Box, ...]]: ...
    def put(self, tensor: TensorName, box: Box, data: Raw) -> None: ...
    def filled(self, version: int, *, whole: bool) -> None: ...
    def state_digests(self, version: int) -> Mapping[str, int]: ...


class Offering:
    """`state`: the holder of what is offered; `wire`: of the copies that weight syncs read, where there are any."""

    def __init__(self, engine: StateEngine, transport: Transport, state: RankRef, wire: RankRef) -> None:
        self._engine, self._transport = engine, transport
        self._state, self._wire = state, wire
        self._version = -1
        self._published = False

    def offer(self, version: int, timeout: float) -> RankHolding:
        """Serve what is here of `version`, and no copies for weight syncs meanwhile: their memory is what the first
        round of a move in place needs. Idempotent. StaleVersion when the engine has nothing of it."""
        self._take_back(self._wire, timeout)
        arrays = self._engine.offer(version)
        if not self._published or version != self._version:  # once: its readers are counted
            self._transport.publish(self._state, version, arrays)
            self._version, self._published = version, True
        boxes = {name: tuple(box for box, _ in parts) for name, parts in arrays.items()}
        return RankHolding(self._state.rank, self._transport.address, version, boxes)

    def withdraw(self, timeout: float) -> None:
        """Serve nothing of it, nor copies until they are published again. Idempotent.

        DeadlineExceeded while somebody still reads after `timeout` seconds.
        """
        self._take_back(self._state, timeout)
        self._engine.withdraw()

    def drop(self, tensors: Iterable[TensorName], timeout: float) -> None:
        """Free these tensors and go on offering the others. Idempotent."""
        self._take_back(self._state, timeout)
        self._engine.drop(tensors)
        self.offer(self._version, timeout)

    def pull(self, request: PullRequest, more: bool) -> RankPull:
        """Bring what is not here yet of the boxes in `request` to its place; after the part without `more` the state
        must be whole and is of `request.version`. Raises what the transport raises; what came until then stays."""
        lacking = self._engine.lacking(request.version, [(item.tensor, item.box) for item in request.items])
        items = tuple(
            replace(item, box=box) for item, boxes in zip(request.items, lacking, strict=True) for box in boxes
        )
        report = PullReport(0, 0, 0.0, 0)
        try:
            if items:
                report = self._transport.pull(replace(request, items=items), self._engine.put)
        finally:
            self._engine.filled(request.version, whole=False)
        if not more:
            self._take_back(self._state, request.deadline)
            self._engine.filled(request.version, whole=True)
        return RankPull(self._state.rank, report.moved_bytes, report.seconds, report.digest)

    def digests(self, version: int) -> Mapping[str, int]:
        """See `RankState.state_digests`."""
        return self._engine.state_digests(version)

    def _take_back(self, holder: RankRef, timeout: float) -> None:
        """After this nobody reads the holder's arrays."""
        if not self._transport.withdraw(holder, timeout=timeout):
            raise DeadlineExceeded(
                f"{holder} is still being read after {timeout:g} s", remedy="end the pull, and try again", source=holder
            )
        if holder == self._state:
            self._published = False


class OffersState:
    """The calls of a rank's worker that move its state; each is the `Offering`'s."""

    _offering: Offering

    def offer(self, version: int, timeout: float) -> RankHolding:
        return self._offering.offer(version, timeout)

    def withdraw(self, timeout: float) -> None:
        self._offering.withdraw(timeout)

    def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        self._offering.drop(tensors, timeout)

    def pull_state(self, request: PullRequest, more: bool) -> RankPull:
        return self._offering.pull(request, more)

    def digest_state(self, version: int) -> Mapping[str, int]:
        return self._offering.digests(version)
