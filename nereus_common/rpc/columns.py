"""Columns on the wire: named arrays ↔ a stream of ColumnChunk, checked as they arrive."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.v1.columns_pb2 import ColumnChunk
from nereus_common.core.errors import InvalidInput

CHUNK_BYTES = 1 << 20
MAX_BYTES = 1 << 30
MAX_COLUMNS = 64
MAX_DIMENSIONS = 8
DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)


def chunks_from_columns(columns: Mapping[str, NDArray[Any]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[ColumnChunk]:
    """Cut the columns, one after the other, into pieces of at most `chunk_bytes`; an empty array is one piece."""
    for name, array in columns.items():
        if array.dtype.name not in DTYPES:
            raise _wrong(name, f"dtype {array.dtype} does not travel", remedy=f"use one of {', '.join(sorted(DTYPES))}")
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        for offset in range(0, max(len(raw), 1), chunk_bytes):
            yield ColumnChunk(
                name=name,
                dtype=array.dtype.name,
                shape=array.shape,
                offset=offset,
                data=raw[offset : offset + chunk_bytes].tobytes(),
            )


async def columns_from_chunks(
    chunks: AsyncIterable[ColumnChunk], max_bytes: int = MAX_BYTES
) -> dict[str, NDArray[Any]]:
    """Collect columns until the stream ends; `max_bytes` bounds them all together. InvalidInput names the column."""
    columns = Columns(max_bytes)
    async for chunk in chunks:
        columns.add(chunk)
    return columns.finish()


@dataclass(slots=True)
class _Growing:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]
    filled: int = 0


class Columns:
    """Columns while their pieces arrive. Storage is taken when a column begins, within `max_bytes` for all."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._room = max_bytes
        self._columns: dict[str, _Growing] = {}

    def add(self, chunk: ColumnChunk) -> None:
        """Take the next piece; InvalidInput when it does not continue its column."""
        column = self._columns.get(chunk.name)
        if column is None:
            column = self._columns[chunk.name] = self._begin(chunk)
        elif column.filled == len(column.raw):
            raise _wrong(chunk.name, "a piece follows its last one")
        if (column.dtype.name, column.shape) != (chunk.dtype, tuple(chunk.shape)):
            raise _wrong(chunk.name, f"a piece is {chunk.dtype} {list(chunk.shape)}, the first was another")
        if chunk.offset != column.filled:
            raise _wrong(chunk.name, f"a piece begins at byte {chunk.offset}, not {column.filled}")
        end = column.filled + len(chunk.data)
        if end > len(column.raw) or (not chunk.data and len(column.raw)):
            raise _wrong(chunk.name, f"a piece of {len(chunk.data)} bytes at byte {chunk.offset} of {len(column.raw)}")
        column.raw[column.filled : end] = np.frombuffer(chunk.data, np.uint8)
        column.filled = end

    def finish(self) -> dict[str, NDArray[Any]]:
        """All columns, writable, in the order in which they began; InvalidInput when one is incomplete."""
        return {name: _finished(name, column) for name, column in self._columns.items()}

    def _begin(self, chunk: ColumnChunk) -> _Growing:
        if not chunk.name or len(self._columns) == MAX_COLUMNS:
            raise _wrong(chunk.name, f"it has no name, or is more than the {MAX_COLUMNS} columns that may come")
        if chunk.dtype not in DTYPES:
            raise _wrong(chunk.name, f"dtype {chunk.dtype!r} is not accepted", remedy=", ".join(sorted(DTYPES)))
        if len(chunk.shape) > MAX_DIMENSIONS:
            raise _wrong(chunk.name, f"it has {len(chunk.shape)} dimensions", remedy=f"at most {MAX_DIMENSIONS}")
        dtype = np.dtype(chunk.dtype)
        size = math.prod(chunk.shape) * dtype.itemsize
        if size > self._room:
            raise _wrong(chunk.name, f"its {size} bytes are over the {self._room} still accepted", remedy="send less")
        self._room -= size
        return _Growing(dtype, tuple(chunk.shape), np.empty(size, np.uint8))


def _finished(name: str, column: _Growing) -> NDArray[Any]:
    if column.filled != len(column.raw):
        raise _wrong(name, f"{column.filled} of {len(column.raw)} bytes arrived")
    if column.dtype == np.bool_ and column.raw.size and column.raw.max() > 1:
        raise _wrong(name, "a byte of it is neither 0 nor 1")
    little = column.raw.view(column.dtype.newbyteorder("<"))
    return little.astype(column.dtype, copy=False).reshape(column.shape)


def _wrong(name: str, what: str, remedy: str = "") -> InvalidInput:
    return InvalidInput(f"column {name!r}: {what}", remedy=remedy, field=name)
