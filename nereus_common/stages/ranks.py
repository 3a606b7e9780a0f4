"""Between what a unit is told as a whole and what each of its torch ranks is asked and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from nereus_common.core.ids import DeviceId, TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.stages.base import Holding, PullOrder, RankHolding
from nereus_common.state.digest import combine
from nereus_common.state.dtypes import item_bytes
from nereus_common.transport.base import PullItem, PullRequest


class Answer(Protocol):
    """What a rank says of itself."""

    @property
    def address(self) -> bytes: ...
    @property
    def boxes(self) -> Mapping[TensorName, tuple[Box, ...]]: ...


def request_of(order: PullOrder, rank: int) -> PullRequest:
    """The rank's share of an order."""
    return PullRequest(
        version=order.version,
        items=tuple(
            PullItem(move.tensor, move.box, move.source, order.addresses[move.source])
            for move in order.transfers
            if move.target.rank == rank
        ),
        item_bytes=item_bytes(order.wire_dtype),
        deadline=order.timeout,
        transition=order.transition,
        wire_dtype=order.wire_dtype,
        checked=not order.compared_whole,
    )


def holding_of(version: int, devices: Sequence[DeviceId], found: Sequence[Answer]) -> Holding:
    """What all ranks answered, in rank order."""
    ranks = (
        RankHolding(rank, str(device), one.address, one.boxes)
        for rank, (device, one) in enumerate(zip(devices, found, strict=True))
    )
    return Holding(version, tuple(ranks))


def summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """By kind, the digest of all ranks' parts together."""
    return {kind: combine(part[kind] for part in parts) for kind in parts[0]}


def by_rank(names: Iterable[str], holdings: Iterable[Holding]) -> dict[RankRef, RankHolding]:
    """The ranks of several units, each unit's under its name: its id, or that of the holder of what it offers."""
    return {
        RankRef(name, rank.rank): rank for name, holding in zip(names, holdings, strict=True) for rank in holding.ranks
    }
