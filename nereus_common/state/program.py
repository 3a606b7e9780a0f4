"""Transfer programs: who sends which box to whom, so that every lacking byte arrives once.

Pure and deterministic: the program depends on what is held and needed, not on the order in which it is listed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import DeviceId, TensorName
from nereus_common.core.transfer import Box, RankRef, Transfer, TransferProgram
from nereus_common.state.boxes import cells, coalesce, cut, difference
from nereus_common.state.dtypes import item_bytes

BUCKET_BYTES = 256 << 20
SPREAD_BYTES = 16 << 20
"""Where several ranks can send a box equally well, it is cut this small, so that they share the work."""

Holdings = Mapping[RankRef, Mapping[TensorName, Sequence[Box]]]
Distance = Callable[[RankRef, RankRef], int]
"""(source, target) → how far apart; the nearest holder sends."""


def anywhere(source: RankRef, target: RankRef) -> int:
    """All ranks equally far apart."""
    return 0


def device_distance(devices: Mapping[RankRef, DeviceId]) -> Distance:
    """0 on the same device, 1 on the same node, 2 between nodes."""

    def distance(source: RankRef, target: RankRef) -> int:
        here, there = devices[source], devices[target]
        return 0 if here == there else 1 if here.node == there.node else 2

    return distance


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box that a target lacks, and the ranks that could send all of it, nearest only."""

    target: RankRef
    tensor: TensorName
    box: Box
    candidates: tuple[RankRef, ...]


def compile_program(
    targets: Holdings,
    sources: Holdings,
    *,
    held: Holdings | None = None,
    wire_dtype: str,
    distance: Distance = anywhere,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferProgram:
    """Fill `targets` from `sources`.

    What a target already holds of the version (`held`, and its own boxes where it is itself a source) is not sent. Per
    target, transfers are in model order and their buckets, numbered from 0, hold at most `bucket_bytes` each.
    NotFound: a box that nobody holds. InvalidInput: an unknown dtype or a bucket smaller than one item.
    """
    size = item_bytes(wire_dtype)
    if bucket_bytes < size:
        raise InvalidInput(f"bucket_bytes is {bucket_bytes}, one {wire_dtype} has {size}", field="bucket_bytes")
    known = _Sources(sources)
    lacking = _lacking(targets, sources, held or {})
    pieces = [
        piece
        for target, name, box in lacking
        for piece in _pieces(target, name, box, known, distance, size, bucket_bytes)
    ]
    transfers = _bucketed(_assign(pieces), bucket_bytes // size)
    return TransferProgram(tuple(transfers), wire_dtype, size)


def bytes_needed(targets: Holdings, *, held: Holdings | None = None, wire_dtype: str) -> int:
    """What the targets lack, in the wire dtype: no padding, a tied tensor once per rank."""
    return sum(box.elements for _, _, box in _lacking(targets, {}, held or {})) * item_bytes(wire_dtype)


def _lacking(targets: Holdings, sources: Holdings, held: Holdings) -> list[tuple[RankRef, TensorName, Box]]:
    """Every box to be received, by target in model order."""
    result = []
    for target in sorted(targets):
        for name in sorted(targets[target], key=_model_order):
            has = (*held.get(target, {}).get(name, ()), *sources.get(target, {}).get(name, ()))
            result += [(target, name, box) for box in difference(targets[target][name], has)]
    return result


def _model_order(name: TensorName) -> tuple[tuple[int, int | str], ...]:
    """Names in order, numbers in them as numbers: layer 2 before layer 10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


class _Sources:
    """Who holds what. Layers repeat their geometry, so answers are remembered by geometry and box."""

    def __init__(self, sources: Holdings) -> None:
        holders: dict[TensorName, dict[Box, list[RankRef]]] = defaultdict(lambda: defaultdict(list))
        for rank in sorted(sources):
            for name, region in sources[rank].items():
                for box in region:
                    holders[name][box].append(rank)
        numbers: dict[tuple[tuple[Box, tuple[RankRef, ...]], ...], int] = {}
        self._geometry = {
            name: numbers.setdefault(tuple((box, tuple(ranks)) for box, ranks in by_box.items()), len(numbers))
            for name, by_box in holders.items()
        }
        self._shapes = tuple(numbers)
        self._known: dict[tuple[int, Box], tuple[tuple[Box, tuple[RankRef, ...]], ...]] = {}

    def cells(self, name: TensorName, box: Box) -> tuple[tuple[Box, tuple[RankRef, ...]], ...]:
        """`box` cut so that each part is held whole by the ranks named with it, or by none."""
        if name not in self._geometry:
            return ((box, ()),)
        key = (self._geometry[name], box)
        if key not in self._known:
            near = [(held, ranks) for held, ranks in self._shapes[key[0]] if held.intersect(box)]
            self._known[key] = tuple(
                (cell, tuple(sorted({rank for held, ranks in near if held.contains(cell) for rank in ranks})))
                for cell in cells(box, [held for held, _ in near])
            )
        return self._known[key]


def _pieces(
    target: RankRef, name: TensorName, box: Box, known: _Sources, distance: Distance, size: int, bucket_bytes: int
) -> list[_Piece]:
    by_candidates: dict[tuple[RankRef, ...], list[Box]] = defaultdict(list)
    for cell, able in known.cells(name, box):
        if not able:
            raise NotFound(
                f"no source holds {name}{cell}, which {target} needs",
                remedy="load that box from a checkpoint or from another unit",
                tensor=name,
                box=cell,
            )
        apart = {rank: distance(rank, target) for rank in able}
        nearest = min(apart.values())
        by_candidates[tuple(rank for rank in able if apart[rank] == nearest)].append(cell)
    pieces = []
    for candidates, region in by_candidates.items():
        limit = bucket_bytes if len(candidates) == 1 else min(bucket_bytes, SPREAD_BYTES)
        pieces += [
            _Piece(target, name, part, candidates)
            for joined in coalesce(region)
            for part in cut(joined, max(1, limit // size))
        ]
    return pieces


def _assign(pieces: Sequence[_Piece]) -> list[tuple[_Piece, RankRef]]:
    """Give each piece a sender: the one with the least to send so far, large pieces first (Graham's LPT rule)."""
    load: dict[RankRef, int] = defaultdict(int)
    sender: dict[int, RankRef] = {}
    order = sorted(range(len(pieces)), key=lambda index: (len(pieces[index].candidates), -pieces[index].box.elements))
    for index in order:
        piece = pieces[index]
        chosen = min(piece.candidates, key=lambda rank: (load[rank], rank))
        load[chosen] += piece.box.elements
        sender[index] = chosen
    return [(piece, sender[index]) for index, piece in enumerate(pieces)]


def _bucketed(assigned: Iterable[tuple[_Piece, RankRef]], limit: int) -> list[Transfer]:
    """Number the buckets of each target; none holds more than `limit` elements."""
    transfers: list[Transfer] = []
    for target, of_target in groupby(assigned, key=lambda entry: entry[0].target):
        bucket = fill = 0
        for tensor, box, source in _joined(of_target, limit):
            if fill + box.elements > limit:
                bucket, fill = bucket + 1, 0
            fill += box.elements
            transfers.append(Transfer(tensor, box, source, target, bucket))
    return transfers


def _joined(of_target: Iterable[tuple[_Piece, RankRef]], limit: int) -> Iterator[tuple[TensorName, Box, RankRef]]:
    """Join the neighbouring boxes of a tensor that come from one sender, as far as they fit into a bucket."""
    for tensor, of_tensor in groupby(of_target, key=lambda entry: entry[0].tensor):
        by_source: dict[RankRef, list[Box]] = defaultdict(list)
        for piece, source in of_tensor:
            by_source[source].append(piece.box)
        for box, source in sorted(
            (part, source)
            for source, region in by_source.items()
            for joined in coalesce(region)
            for part in cut(joined, limit)
        ):
            yield tensor, box, source
