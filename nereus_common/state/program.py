"""Transfer programs: who sends which box to whom, so that every lacking byte arrives once.

Pure and deterministic: the program depends on what is held and needed, not on the order in which it is listed. What is
worked out once per geometry: the boxes and their holders (`pieces`). What is worked out per tensor, because tensors
share the links: the senders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.transfer import Columns, TransferProgram
from nereus_common.state.box_arrays import BoxArray, Integers, concatenate, cut, join, spread
from nereus_common.state.boxes import elements
from nereus_common.state.distance import Distance, anywhere
from nereus_common.state.dtypes import item_bytes
from nereus_common.state.holdings import Holdings, Survey, survey
from nereus_common.state.pieces import Pieces, RankSets, pieces_of
from nereus_common.state.senders import balanced, nearest

BUCKET_BYTES = 256 << 20
SPREAD_BYTES = 16 << 20
"""Where several ranks can send a box equally well, it is cut this small, so that they share the work."""


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
    found, sets = survey(targets, sources, held or {}), RankSets()
    near = nearest(pieces_of(found, sets), sets, found.ranks, distance)
    pieces = _cut(near, sets, bucket_bytes // size, max(1, min(bucket_bytes, SPREAD_BYTES) // size))
    moves = _joined(_moves(pieces, sets, found), bucket_bytes // size)
    return TransferProgram(_columns(moves, found, bucket_bytes // size), wire_dtype, size)


def bytes_needed(targets: Holdings, *, held: Holdings | None = None, wire_dtype: str) -> int:
    """What the targets lack, in the wire dtype: no padding, a tied tensor once per rank."""
    found = survey(targets, {}, held or {})
    sizes: dict[int, int] = {}
    needed = 0
    for geometry in found.geometries:
        for region in geometry.lacking[:, 1].tolist():
            if region not in sizes:
                sizes[region] = elements(found.regions[region])
            needed += sizes[region] * len(geometry.tensors)
    return needed * item_bytes(wire_dtype)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Columns, one row per transfer; `box` is a row of `boxes`."""

    tensor: Integers
    target: Integers
    source: Integers
    box: Integers
    boxes: BoxArray


def _cut(pieces: Pieces, sets: RankSets, limit: int, spread_limit: int) -> Pieces:
    """Neighbours with the same holders joined, and cut to the size in which they are sent."""
    boxes, rows = _join_crowded(pieces.boxes, (pieces.geometry, pieces.target, pieces.holders))
    joined = pieces.with_boxes(boxes, rows)
    limits = np.where(sets.sizes[joined.holders] > 1, spread_limit, limit) if len(joined) else joined.holders
    return joined.with_boxes(*cut(boxes, limits))


def _moves(pieces: Pieces, sets: RankSets, found: Survey) -> _Moves:
    """Every piece of every tensor of its geometry, with its sender."""
    counts = np.array([len(geometry.tensors) for geometry in found.geometries], np.int64)
    tensors = np.concatenate([geometry.tensors for geometry in found.geometries] or [counts])
    first = np.cumsum(counts) - counts
    piece, nth = spread(counts[pieces.geometry])
    tensor = tensors[first[pieces.geometry[piece]] + nth]
    # Tensor by tensor: targets that begin together then take the same tensor from different senders.
    order = np.lexsort((piece, tensor))
    piece, tensor = piece[order], tensor[order]
    if not len(piece):
        return _Moves(tensor, piece, piece, piece, pieces.boxes)
    source = balanced(pieces.holders[piece], pieces.boxes.elements[piece], sets, len(found.ranks))
    return _Moves(tensor, pieces.target[piece], source, piece, pieces.boxes)


def _joined(moves: _Moves, limit: int) -> _Moves:
    """The neighbouring boxes of a tensor that go from one sender to one target joined, as far as a bucket holds."""
    crowded = _crowded(_key(moves.tensor, moves.target, moves.source))
    if not crowded.any():
        return moves
    rows = np.flatnonzero(crowded)
    key = _key(moves.tensor[rows], moves.target[rows], moves.source[rows])
    boxes, origin = join(moves.boxes.take(moves.box[rows]), key)
    boxes, again = cut(boxes, np.full(len(boxes), limit))
    kept = np.concatenate([np.flatnonzero(~crowded), rows[origin[again]]])
    box = np.concatenate([moves.box[~crowded], len(moves.boxes) + np.arange(len(boxes))])
    return _Moves(moves.tensor[kept], moves.target[kept], moves.source[kept], box, concatenate([moves.boxes, boxes]))


def _join_crowded(boxes: BoxArray, columns: tuple[Integers, ...]) -> tuple[BoxArray, Integers]:
    """`join` on equal `columns`, touching only rows that are not alone in theirs."""
    key = _key(*columns)
    crowded = _crowded(key)
    rows = np.flatnonzero(crowded)
    joined, origin = join(boxes.take(rows), key[rows])
    alone = np.flatnonzero(~crowded)
    return concatenate([boxes.take(alone), joined]), np.concatenate([alone, rows[origin]])


def _key(*columns: Integers) -> Integers:
    """One number per row, equal where all columns are."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    return key


def _crowded(key: Integers) -> NDArray[np.bool_]:
    """Which rows share their key with another."""
    order = np.argsort(key, kind="stable")
    same = np.diff(key[order]) == 0
    crowded = np.zeros(len(key), bool)
    crowded[order[1:][same]] = True
    crowded[order[:-1][same]] = True
    return crowded


def _columns(moves: _Moves, found: Survey, limit: int) -> Columns:
    """In order of target, tensor and box, with the buckets of each target numbered."""
    starts = moves.boxes.start[moves.box]
    order = np.lexsort((*reversed(starts.T), moves.tensor, moves.target))
    tensor, box, target = moves.tensor[order], moves.box[order], moves.target[order]
    of_tensor = np.zeros(len(found.tensors), np.int64)
    for geometry in found.geometries:
        of_tensor[geometry.tensors] = found.dimensions(geometry)
    dimensions = np.zeros(len(moves.boxes), np.int64)
    dimensions[box] = of_tensor[tensor]
    return Columns(
        tensors=found.tensors,
        ranks=found.ranks,
        start=moves.boxes.start,
        stop=moves.boxes.stop,
        dimensions=dimensions,
        tensor=tensor,
        box=box,
        source=moves.source[order],
        target=target,
        bucket=_buckets(target, moves.boxes.elements[box], limit),
    )


def _buckets(target: Integers, size: Integers, limit: int) -> Integers:
    """Each target's items in turn into buckets of at most `limit`; the next begins where one does not fit."""
    buckets = np.zeros(len(target), np.int64)
    ends = np.flatnonzero(np.diff(target, append=-1)) + 1
    filled = np.cumsum(size)
    first = 0
    for end in ends.tolist():
        bucket = 0
        while first < end:
            before = filled[first] - size[first]
            last = min(end, int(np.searchsorted(filled, before + limit, side="right")))
            buckets[first:last] = bucket
            first, bucket = last, bucket + 1
    return buckets
