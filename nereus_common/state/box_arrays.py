"""Many boxes at once: the algebra of `boxes` on integer arrays, for programs of a million transfers.

A row is one box of `dimensions` columns; a box of fewer dimensions is filled up with [0, 1), which changes neither its
elements nor what it has in common with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.transfer import Box

Integers = NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 21
"""How many pairs of boxes are compared in one go: bounds the memory to a few tens of MB."""


@dataclass(frozen=True, slots=True)
class BoxArray:
    """`start` and `stop` are [n, dimensions]."""

    start: Integers
    stop: Integers

    @classmethod
    def of(cls, boxes: Sequence[Box], dimensions: int) -> BoxArray:
        """Rows of boxes that have at most `dimensions` dimensions."""
        start = [box.start + (0,) * (dimensions - len(box.start)) for box in boxes]
        stop = [box.stop + (1,) * (dimensions - len(box.stop)) for box in boxes]
        shape = (len(boxes), dimensions)
        return cls(np.array(start, np.int64).reshape(shape), np.array(stop, np.int64).reshape(shape))

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: Integers | NDArray[np.bool_]) -> BoxArray:
        return BoxArray(self.start[rows], self.stop[rows])

    @property
    def elements(self) -> Integers:
        found: Integers = (self.stop - self.start).prod(axis=1)
        return found


def concatenate(parts: Sequence[BoxArray]) -> BoxArray:
    """All rows, in order; at least one part."""
    return BoxArray(np.concatenate([part.start for part in parts]), np.concatenate([part.stop for part in parts]))


def overlaps(one: BoxArray, other: BoxArray) -> tuple[Integers, Integers]:
    """The pairs (row of one, row of other) that have elements in common, ascending."""
    step = max(1, _PAIRS_AT_ONCE // max(1, len(other)))
    found = [_overlaps(one, other, first, first + step) for first in range(0, len(one), step)]
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([rows for rows, _ in found]), np.concatenate([rows for _, rows in found])


def _overlaps(one: BoxArray, other: BoxArray, first: int, last: int) -> tuple[Integers, Integers]:
    start, stop = one.start[first:last], one.stop[first:last]
    meet = np.ones((len(start), len(other)), bool)
    for axis in range(start.shape[1]):
        meet &= start[:, axis, None] < other.stop[:, axis]
        meet &= other.start[:, axis] < stop[:, axis, None]
    rows, columns = np.nonzero(meet)
    return rows + first, columns


def common(one: BoxArray, other: BoxArray) -> BoxArray:
    """Row by row, the part in both; only of rows that overlap."""
    return BoxArray(np.maximum(one.start, other.start), np.minimum(one.stop, other.stop))


def are_disjoint(boxes: BoxArray) -> bool:
    """Whether no element is in two of the boxes, none of which is empty."""
    return len(overlaps(boxes, boxes)[0]) == len(boxes)


def spread(counts: Integers) -> tuple[Integers, Integers]:
    """For rows that become `counts` rows each: of every new row, its old row, and its place among that row's."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def cut(boxes: BoxArray, limit: Integers) -> tuple[BoxArray, Integers]:
    """Cut each box, as `boxes.cut` does, into pieces of at most `limit` (per row) elements; also each piece's row."""
    origin = np.arange(len(boxes))
    while (large := boxes.elements > limit[origin]).any():
        big, of = boxes.take(large), origin[large]
        sizes = big.stop - big.start
        axis = (sizes > 1).argmax(axis=1)
        every = np.arange(len(big))
        length = sizes[every, axis]
        step = np.maximum(1, limit[of] // (big.elements // length))
        row, place = spread(-(-length // step))
        pieces = big.take(row)
        along, every = axis[row], np.arange(len(row))
        pieces.start[every, along] += place * step[row]
        pieces.stop[every, along] = np.minimum(pieces.start[every, along] + step[row], pieces.stop[every, along])
        boxes = concatenate([boxes.take(~large), pieces])
        origin = np.concatenate([origin[~large], of[row]])
    return boxes, origin


def join(boxes: BoxArray, key: Integers) -> tuple[BoxArray, Integers]:
    """Join disjoint boxes of equal `key` that share a whole face, until none do; also a row that each came from."""
    origin = np.arange(len(boxes))
    while len(boxes):
        before = len(boxes)
        for axis in reversed(range(boxes.start.shape[1])):
            boxes, rows = _join_along(boxes, key[origin], axis)
            origin = origin[rows]
        if len(boxes) == before:
            break
    return boxes, origin


def _join_along(boxes: BoxArray, key: Integers, axis: int) -> tuple[BoxArray, Integers]:
    others = [other for other in range(boxes.start.shape[1]) if other != axis]
    faces = [key, *(boxes.start[:, other] for other in others), *(boxes.stop[:, other] for other in others)]
    order = np.lexsort([boxes.start[:, axis], *faces])
    start, stop = boxes.start[order], boxes.stop[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = start[1:, axis] != stop[:-1, axis]
    for face in faces:
        fresh[1:] |= face[order][1:] != face[order][:-1]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(order)) - 1
    return BoxArray(start[first], stop[last]), order[first]
