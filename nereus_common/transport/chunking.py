"""Cutting boxes into pieces and pieces into chunks, alike on both sides of a pull.

A *piece* is a box small enough for a staging buffer; a *chunk* is what travels as one message: one large piece, or
several small ones back to back. Source and receiver compute the same chunks from the same items, so that a chunk's
number is all they need to agree on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport.base import Raw

UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INFINITY: dict[str, tuple[type[np.unsignedinteger[Any]], type[np.signedinteger[Any]], int]] = {
    "bfloat16": (np.uint16, np.int16, 0x7F80),
    "float16": (np.uint16, np.int16, 0x7C00),
    "float32": (np.uint32, np.int32, 0x7F80_0000),
    "float64": (np.uint64, np.int64, 0x7FF0_0000_0000_0000),
}
"""dtype → (bits as, bits as, those of infinity): every larger magnitude is NaN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor; `shape` is the logical tensor's where it is known."""

    tensor: TensorName
    box: Box
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces that travel as one message of `nbytes` bytes, in this order, each in C order."""

    pieces: tuple[Piece, ...]
    nbytes: int


class View(Protocol):
    """Gives the array behind a box of a tensor, as a view."""

    def __call__(self, tensor: TensorName, box: Box) -> NDArray[Any]: ...


def cut_box(box: Box, limit: int) -> Iterator[Box]:
    """Disjoint boxes of at most `limit` (≥ 1) elements that cover `box`, cut along its leading dimensions, in C order.

    An empty box yields nothing.
    """
    if not box.elements:
        return
    if box.elements <= limit:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    rows = max(1, limit // (box.elements // box.shape[axis]))
    for first in range(box.start[axis], box.stop[axis], rows):
        last = min(first + rows, box.stop[axis])
        start, stop = list(box.start), list(box.stop)
        start[axis], stop[axis] = first, last
        yield from cut_box(Box(tuple(start), tuple(stop)), limit)


def plan_chunks(items: Sequence[Piece], item_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut `items` (boxes of any size) into chunks of at most `chunk_bytes` bytes; a pure function of its arguments.

    Pieces of half a chunk and more travel alone, so that a contiguous one is sent from where it lies.
    """
    if item_bytes not in UNSIGNED or chunk_bytes < item_bytes:
        raise InvalidInput(
            f"items of {item_bytes} bytes in chunks of {chunk_bytes} bytes cannot be moved",
            remedy="items have 1, 2, 4 or 8 bytes, and a chunk holds at least one",
            field="item_bytes",
        )
    chunks: list[Chunk] = []
    small: list[Piece] = []
    filled = 0
    for item in items:
        for box in cut_box(item.box, chunk_bytes // item_bytes):
            piece, size = Piece(item.tensor, box, item.shape), box.elements * item_bytes
            if 2 * size >= chunk_bytes:
                chunks.append(Chunk((piece,), size))
                continue
            if filled + size > chunk_bytes:
                chunks.append(Chunk(tuple(small), filled))
                small, filled = [], 0
            small.append(piece)
            filled += size
    if small:
        chunks.append(Chunk(tuple(small), filled))
    return chunks


def split(chunk: Chunk, data: Raw, item_bytes: int) -> Iterator[tuple[Piece, Raw]]:
    """The pieces of `chunk` with their bytes in `data`, which has `chunk.nbytes` of them."""
    at = 0
    for piece in chunk.pieces:
        size = piece.box.elements * item_bytes
        yield piece, data[at : at + size]
        at += size


def digest_piece(piece: Piece, array: NDArray[Any]) -> int:
    """Digest of `piece`, whose elements `array` holds. Without a known shape the piece's own end stands for it, which
    gives the same value for up to two dimensions."""
    return digest_box(piece.tensor, piece.shape or piece.box.stop, piece.box, array)


def payload(chunk: Chunk, view: View, item_bytes: int, staging: Raw | None, *, digest: bool) -> tuple[Raw, int]:
    """The bytes of `chunk` and their digest (0 without `digest`), read through `view`.

    A single contiguous piece is returned where it lies; anything else is packed into `staging`.
    """
    arrays = [view(piece.tensor, piece.box) for piece in chunk.pieces]
    for piece, array in zip(chunk.pieces, arrays, strict=True):
        if array.dtype.itemsize != item_bytes:
            raise InvalidInput(
                f"{piece.tensor} is held with {array.dtype.itemsize} bytes per element, asked for with {item_bytes}",
                remedy="publish and pull in one wire dtype",
                field="item_bytes",
            )
    total = combine(map(digest_piece, chunk.pieces, arrays)) if digest else 0
    if is_direct(arrays):
        return arrays[0].reshape(-1).view(np.uint8), total
    assert staging is not None, "a chunk that must be packed needs a staging buffer"
    for (piece, out), array in zip(split(chunk, staging[: chunk.nbytes], item_bytes), arrays, strict=True):
        words = UNSIGNED[item_bytes]
        np.copyto(out.view(words).reshape(piece.box.shape), array.view(words))
    return staging[: chunk.nbytes], total


def is_direct(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether these arrays can be sent without packing."""
    return len(arrays) == 1 and arrays[0].flags.c_contiguous


def digest_staged(chunk: Chunk, data: Raw, item_bytes: int) -> int:
    """Digest of the staged bytes of `chunk`."""
    words = UNSIGNED[item_bytes]
    return combine(
        digest_piece(piece, part.view(words).reshape(piece.box.shape)) for piece, part in split(chunk, data, item_bytes)
    )


def all_finite(data: Raw, wire_dtype: str) -> bool:
    """Whether no element is NaN or infinite; True for dtypes that have neither."""
    if wire_dtype not in _INFINITY or not data.size:
        return True
    unsigned, signed, infinity = _INFINITY[wire_dtype]
    # As signed numbers the largest positive value is the largest; as unsigned ones the largest negative is.
    negative = infinity + (1 << (8 * np.dtype(unsigned).itemsize - 1))
    return int(data.view(signed).max()) < infinity and int(data.view(unsigned).max()) < negative
