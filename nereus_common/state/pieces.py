"""Pieces: the boxes that targets lack, cut so that each is held whole by the ranks named with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nereus_common.core.errors import NotFound
from nereus_common.core.transfer import Box
from nereus_common.state.box_arrays import BoxArray, Integers, are_disjoint, common, concatenate, overlaps, spread
from nereus_common.state.boxes import cells, difference
from nereus_common.state.holdings import Geometry, Survey


class RankSets:
    """Sets of ranks by number; equal ones have the same."""

    def __init__(self) -> None:
        self._all: list[Integers] = []
        self._numbers: dict[bytes, int] = {}

    def __getitem__(self, number: int) -> Integers:
        """Ranks, ascending."""
        return self._all[number]

    def number(self, ranks: Integers) -> int:
        """Of ascending, distinct ranks."""
        key = ranks.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._all)
            self._all.append(ranks)
        return self._numbers[key]

    @property
    def sizes(self) -> Integers:
        return np.array([len(ranks) for ranks in self._all], np.int64)

    @property
    def firsts(self) -> Integers:
        return np.array([ranks[0] for ranks in self._all], np.int64)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns, one row per piece: `target` lacks `boxes` of every tensor of `geometry`; any of `holders`, a number in
    RankSets, could send it."""

    geometry: Integers
    target: Integers
    boxes: BoxArray
    holders: Integers

    def __len__(self) -> int:
        return len(self.target)

    def with_boxes(self, boxes: BoxArray, rows: Integers) -> Pieces:
        """Other boxes, each with all else of one of the rows."""
        return Pieces(self.geometry[rows], self.target[rows], boxes, self.holders[rows])


def pieces_of(found: Survey, sets: RankSets) -> Pieces:
    """NotFound: a box that nobody holds."""
    dimensions = max(map(found.dimensions, found.geometries), default=0)
    holders: dict[bytes, _Holders] = {}
    parts = []
    for number, geometry in enumerate(found.geometries):
        key = geometry.held.tobytes()
        if key not in holders:
            holders[key] = _Holders(geometry, found, dimensions, sets)
        parts.append(_pieces_of(number, geometry, found, holders[key]))
    if not parts:
        none = np.empty(0, np.int64)
        return Pieces(none, none, BoxArray.of((), dimensions), none)
    columns = zip(*((part.geometry, part.target, part.holders) for part in parts), strict=True)
    geometry_of, target, held_by = (np.concatenate(column) for column in columns)
    return Pieces(geometry_of, target, concatenate([part.boxes for part in parts]), held_by)


class _Holders:
    """The distinct boxes in which a tensor is held, and who holds each."""

    def __init__(self, geometry: Geometry, found: Survey, dimensions: int, sets: RankSets) -> None:
        ranks: dict[Box, list[int]] = {}
        for rank, region in geometry.held.tolist():
            for box in found.regions[region]:
                ranks.setdefault(box, []).append(rank)
        self.boxes = tuple(ranks)
        self.rows = BoxArray.of(self.boxes, dimensions)
        self.ranks = [sorted(set(some)) for some in ranks.values()]
        self.numbers = np.array([sets.number(np.array(some, np.int64)) for some in self.ranks], np.int64)
        self.disjoint = are_disjoint(self.rows)
        self.dimensions = dimensions
        self.sets = sets

    def parts(self, boxes: Sequence[Box]) -> tuple[Integers, BoxArray, Integers]:
        """`boxes` cut so that each part is held whole or not at all: (which box, ascending; part; holders)."""
        rows = BoxArray.of(boxes, self.dimensions)
        wanted, held = overlaps(rows, self.rows)
        if self.disjoint:
            return wanted, common(rows.take(wanted), self.rows.take(held)), self.numbers[held]
        found: list[tuple[int, Box, int]] = []
        ends = np.searchsorted(wanted, np.arange(len(boxes) + 1))
        for number, box in enumerate(boxes):
            found += [(number, *part) for part in self._cells(box, held[ends[number] : ends[number + 1]].tolist())]
        of, cut, holders = zip(*found, strict=True) if found else ((), (), ())
        return np.array(of, np.int64), BoxArray.of(cut, self.dimensions), np.array(holders, np.int64)

    def _cells(self, box: Box, near: Sequence[int]) -> Iterable[tuple[Box, int]]:
        """Where boxes of holders overlap in part, as those of unlike replicas do."""
        for cell in cells(box, [self.boxes[held] for held in near]):
            able = {rank for held in near if self.boxes[held].contains(cell) for rank in self.ranks[held]}
            if able:
                yield cell, self.sets.number(np.array(sorted(able), np.int64))


def _pieces_of(number: int, geometry: Geometry, found: Survey, holders: _Holders) -> Pieces:
    places: dict[Box, int] = {}
    target: list[int] = []
    place: list[int] = []
    for rank, region in geometry.lacking.tolist():
        for box in found.regions[region]:
            target.append(rank)
            place.append(places.setdefault(box, len(places)))
    boxes = tuple(places)
    of, parts, held_by = holders.parts(boxes)
    _check_covered(boxes, of, parts, geometry, found, holders)
    counts = np.bincount(of, minlength=len(boxes))
    wanted = np.array(place, np.int64)
    row, nth = spread(counts[wanted])
    part = (np.cumsum(counts) - counts)[wanted[row]] + nth
    targets = np.array(target, np.int64)[row]
    return Pieces(np.full(len(row), number), targets, parts.take(part), held_by[part])


def _check_covered(
    boxes: Sequence[Box], of: Integers, parts: BoxArray, geometry: Geometry, found: Survey, holders: _Holders
) -> None:
    covered = np.zeros(len(boxes), np.int64)
    np.add.at(covered, of, parts.elements)
    for box, elements in zip(boxes, covered.tolist(), strict=True):
        if elements == box.elements:
            continue
        lost = difference((box,), holders.boxes)[0]
        tensor = found.tensors[int(geometry.tensors[0])]
        rank = next(rank for rank, region in geometry.lacking.tolist() if box in found.regions[region])
        raise NotFound(
            f"no source holds {tensor}{lost}, which {found.ranks[rank]} needs",
            remedy="load that box from a checkpoint or from another unit",
            tensor=tensor,
            box=lost,
        )
