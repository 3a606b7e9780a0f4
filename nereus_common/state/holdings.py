"""Who holds and who lacks what, read into columns and grouped by geometry.

The layers of a model repeat their geometry: tensors that are held in the same boxes by the same ranks, and lacking in
the same boxes on the same ranks, differ in nothing but their name. What is worked out for one of them holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.state.box_arrays import Integers
from nereus_common.state.boxes import Region, difference

Holdings = Mapping[RankRef, Mapping[TensorName, Sequence[Box]]]

NOTHING = 0
"""The number of the empty region."""


class Regions:
    """Regions by number: equal ones have the same."""

    def __init__(self) -> None:
        self._all: list[Region] = [()]
        self._by_value: dict[Region, int] = {(): NOTHING}
        self._by_identity: dict[int, int] = {}
        self._needed: dict[int, int] = {}
        self._alive: list[Sequence[Box]] = []
        self._lacking: dict[tuple[int, ...], int] = {}

    def __getitem__(self, number: int) -> Region:
        return self._all[number]

    def number(self, region: Sequence[Box]) -> int:
        """By identity where it can: an oracle gives a thousand ranks the same few objects."""
        known = self._by_identity.get(id(region))
        if known is None:
            known = self._by_identity[id(region)] = self._add(tuple(box for box in region if box.elements))
            self._alive.append(region)  # an identity means something only as long as its object lives
        return known

    def needed(self, region: Sequence[Box]) -> int:
        """All of it, as disjoint boxes."""
        known = self._needed.get(id(region))
        if known is None:
            known = self._needed[id(region)] = self.lacking(self.number(region))
        return known

    def lacking(self, region: int, *held: int) -> int:
        """What is left of a region without others, as disjoint boxes."""
        key = (region, *held)
        if key not in self._lacking:
            holes = [box for number in held for box in self._all[number]]
            self._lacking[key] = self._add(difference(self._all[region], holes))
        return self._lacking[key]

    def _add(self, region: Region) -> int:
        number = self._by_value.setdefault(region, len(self._all))
        if number == len(self._all):
            self._all.append(region)
        return number


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tensors (by number, in model order) that lie alike. `lacking` and `held` are [n, 2]: rank, region."""

    tensors: Integers
    lacking: Integers
    held: Integers


@dataclass(slots=True)
class Survey:
    """`tensors` in model order and `ranks` in order: what the numbers of the geometries mean."""

    tensors: tuple[TensorName, ...]
    ranks: tuple[RankRef, ...]
    regions: Regions = field(default_factory=Regions)
    geometries: list[Geometry] = field(default_factory=list)

    def dimensions(self, geometry: Geometry) -> int:
        """Of its tensors."""
        return len(self.regions[int(geometry.lacking[0, 1])][0].start)


def survey(targets: Holdings, sources: Holdings, held: Holdings) -> Survey:
    """Everything that `targets` lack of what they need, and the holders of those tensors."""
    names: set[TensorName] = set().union(*targets.values())
    found = Survey(tuple(sorted(names, key=_model_order)), tuple(sorted({*targets, *sources})))
    tensor = {name: number for number, name in enumerate(found.tensors)}
    rank = {ref: number for number, ref in enumerate(found.ranks)}
    lacking = _Listing(len(tensor))
    for ref, boxes in targets.items():
        has = [holdings[ref] for holdings in (held, sources) if ref in holdings]
        lacking.add(rank[ref], [tensor[name] for name in boxes], list(_lacking(boxes, has, found.regions)))
    holders = _Listing(len(tensor))
    for ref, boxes in sources.items():
        number = found.regions.number
        holders.add(rank[ref], [tensor.get(name, -1) for name in boxes], [number(region) for region in boxes.values()])
    found.geometries = _grouped(list(lacking), list(holders))
    return found


def _lacking(
    boxes: Mapping[TensorName, Sequence[Box]], has: Sequence[Mapping[TensorName, Sequence[Box]]], regions: Regions
) -> Iterator[int]:
    if not has:
        return map(regions.needed, boxes.values())
    number = regions.number
    return (
        regions.lacking(number(region), *[number(held[name]) for held in has if name in held])
        for name, region in boxes.items()
    )


class _Listing:
    """(rank, region) pairs by tensor; iterating gives those of each tensor, [n, 2], by rank."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._parts: list[Integers] = [np.empty((0, 3), np.int64)]

    def add(self, rank: int, tensors: list[int], regions: list[int]) -> None:
        self._parts.append(np.array([tensors, [rank] * len(tensors), regions], np.int64).T)

    def __iter__(self) -> Iterator[Integers]:
        rows = np.concatenate(self._parts)
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 2] != NOTHING)]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        ends = np.searchsorted(rows[:, 0], np.arange(self._tensors + 1))
        pairs = np.ascontiguousarray(rows[:, 1:])
        for tensor in range(self._tensors):
            yield pairs[ends[tensor] : ends[tensor + 1]]


def _grouped(lacking: Sequence[Integers], holders: Sequence[Integers]) -> list[Geometry]:
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for tensor, (need, have) in enumerate(zip(lacking, holders, strict=True)):
        if len(need):
            groups.setdefault((need.tobytes(), have.tobytes()), []).append(tensor)
    return [
        Geometry(np.array(tensors, np.int64), lacking[tensors[0]], holders[tensors[0]]) for tensors in groups.values()
    ]


def _model_order(name: TensorName) -> tuple[tuple[int, int | str], ...]:
    """Names in order, numbers in them as numbers: layer 2 before layer 10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)
