"""Boxes and transfer programs: the values that say which bytes move from whom to whom.

The algebra over them is in `nereus_common.state`; transport and engines only carry them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A hyper-rectangle [start, stop) of a logical tensor, one pair per dimension; ((), ()) for a 0-d tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            a < 0 or b < a for a, b in zip(self.start, self.stop, strict=False)
        ):
            raise InvalidInput(f"box {self.start}..{self.stop} is not a hyper-rectangle", field="box")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of `outer`, which contains it."""
        return Box(
            tuple(a - o for a, o in zip(self.start, outer.start, strict=True)),
            tuple(b - o for b, o in zip(self.stop, outer.start, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        return all(a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True, order=True)
class RankRef:
    """One rank of one unit; `unit` is a unit id."""

    unit: str
    rank: int

    def __str__(self) -> str:
        return f"{self.unit}#{self.rank}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Destination rank `target` receives `box` of `tensor` from `source`. Sizes follow from the wire dtype."""

    tensor: TensorName
    box: Box
    source: RankRef
    target: RankRef
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class TransferProgram:
    """All transfers of one move, and the dtype in which every tensor crosses the wire."""

    transfers: tuple[Transfer, ...]
    wire_dtype: str
    item_bytes: int

    def for_target(self, target: RankRef) -> tuple[Transfer, ...]:
        return tuple(transfer for transfer in self.transfers if transfer.target == target)

    @property
    def bytes(self) -> int:
        return sum(transfer.box.elements for transfer in self.transfers) * self.item_bytes


def state_holder(unit: str) -> str:
    """The name under which a unit's ranks hold what they offer, apart from what they publish at every step."""
    return f"{unit}:state"
