"""Boxes and transfer programs: the values that say which bytes move from whom to whom.

The algebra over them is in `nereus_common.state`; transport and engines only carry them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName

Integers = NDArray[np.int64]


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
class Columns:
    """Transfers as columns: one row of each integer array is one transfer, by its place in the tables above.

    `start` and `stop` are [boxes, d]: a box of fewer than d dimensions, as `dimensions` says, is filled up with [0, 1).
    """

    tensors: tuple[TensorName, ...]
    ranks: tuple[RankRef, ...]
    start: Integers
    stop: Integers
    dimensions: Integers
    tensor: Integers
    box: Integers
    source: Integers
    target: Integers
    bucket: Integers

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Self:
        """The columns of transfers, in their order."""
        tensors = tuple(dict.fromkeys(transfer.tensor for transfer in transfers))
        ranks = tuple(dict.fromkeys(rank for move in transfers for rank in (move.source, move.target)))
        boxes = tuple(dict.fromkeys(transfer.box for transfer in transfers))
        name, rank, box = ({key: at for at, key in enumerate(table)} for table in (tensors, ranks, boxes))
        most = max((len(one.start) for one in boxes), default=0)
        return cls(
            tensors,
            ranks,
            _rows([one.start + (0,) * (most - len(one.start)) for one in boxes], most),
            _rows([one.stop + (1,) * (most - len(one.stop)) for one in boxes], most),
            _column(len(one.start) for one in boxes),
            _column(name[move.tensor] for move in transfers),
            _column(box[move.box] for move in transfers),
            _column(rank[move.source] for move in transfers),
            _column(rank[move.target] for move in transfers),
            _column(move.bucket for move in transfers),
        )

    @property
    def elements(self) -> Integers:
        """Of each transfer."""
        sizes: Integers = (self.stop - self.start).prod(axis=1)
        return sizes[self.box]

    def objects(self, rows: Integers) -> Iterator[Transfer]:
        """The transfers of the given rows; equal boxes are one object."""
        boxes: dict[int, Box] = {}
        columns = (self.tensor, self.box, self.source, self.target, self.bucket)
        for tensor, box, source, target, bucket in zip(*(column[rows].tolist() for column in columns), strict=True):
            if box not in boxes:
                size = int(self.dimensions[box])
                boxes[box] = Box(tuple(self.start[box, :size].tolist()), tuple(self.stop[box, :size].tolist()))
            yield Transfer(self.tensors[tensor], boxes[box], self.ranks[source], self.ranks[target], bucket)


class TransferProgram:
    """All transfers of one move, and the dtype in which every tensor crosses the wire.

    Kept as columns: a program for a thousand ranks has a million transfers, and each rank needs its own few only.
    Objects are made when they are asked for.
    """

    def __init__(self, transfers: Sequence[Transfer] | Columns, wire_dtype: str, item_bytes: int) -> None:
        self.columns = transfers if isinstance(transfers, Columns) else Columns.of(transfers)
        self.wire_dtype = wire_dtype
        self.item_bytes = item_bytes

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(self.columns.objects(np.arange(len(self))))

    def for_target(self, target: RankRef) -> tuple[Transfer, ...]:
        """What one rank receives, in order."""
        return self._to([self._numbers[target]] if target in self._numbers else [])

    def for_unit(self, unit: str) -> tuple[Transfer, ...]:
        """What all ranks of one unit receive, by rank, each in its order."""
        return self._to([number for rank, number in self._numbers.items() if rank.unit == unit])

    def _to(self, numbers: Sequence[int]) -> tuple[Transfer, ...]:
        return tuple(self.columns.objects(np.flatnonzero(np.isin(self.columns.target, numbers))))

    @cached_property
    def _numbers(self) -> dict[RankRef, int]:
        return {rank: number for number, rank in enumerate(self.columns.ranks)}

    @property
    def bytes(self) -> int:
        return int(self.columns.elements.sum()) * self.item_bytes

    def bytes_by_link(self) -> dict[tuple[RankRef, RankRef], int]:
        """Bytes per (source, target), where there are any."""
        columns, count = self.columns, len(self.columns.ranks)
        links, at = np.unique(columns.source * count + columns.target, return_inverse=True)
        elements = np.zeros(len(links), np.int64)
        np.add.at(elements, at, columns.elements)
        return {
            (columns.ranks[link // count], columns.ranks[link % count]): size * self.item_bytes
            for link, size in zip(links.tolist(), elements.tolist(), strict=True)
        }

    def __len__(self) -> int:
        """How many transfers."""
        return len(self.columns.tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferProgram):
            return NotImplemented
        same_wire = (self.wire_dtype, self.item_bytes) == (other.wire_dtype, other.item_bytes)
        return same_wire and self.transfers == other.transfers

    __hash__ = None  # type: ignore[assignment]  # a million transfers are no key

    def __repr__(self) -> str:
        return f"TransferProgram({len(self)} transfers, {self.bytes} bytes of {self.wire_dtype})"


def _column(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def _rows(values: Sequence[tuple[int, ...]], width: int) -> Integers:
    return np.array(values, np.int64).reshape(len(values), width)


def state_holder(unit: str) -> str:
    """The name under which a unit's ranks hold what they offer, apart from what they publish at every step."""
    return f"{unit}:state"
