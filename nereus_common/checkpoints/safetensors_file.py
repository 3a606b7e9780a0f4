"""Writing a safetensors file as a stream: one tensor in memory at a time.

The format (huggingface/safetensors, README): 8 bytes little-endian header length, a JSON header with dtype, shape and
byte range of each tensor, padded with spaces so that the data begins at a multiple of 8, then the data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.state.dtypes import item_bytes

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtypes of state, as the format names them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to come; its array may be of any item type of the right width."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = item_bytes(self.dtype)
        for extent in self.shape:
            size *= extent
        return size


def write_safetensors(
    path: Path, entries: Sequence[Entry], arrays: Iterable[NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> int:
    """Write `arrays`, taken one by one in the order of `entries`, durably; returns the file's size in bytes.

    InvalidInput when an array is not of its entry's size; OSError as the file system raises it.
    """
    header = _header(entries, metadata)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for entry, array in zip(entries, arrays, strict=True):
            if array.nbytes != entry.bytes or array.shape != entry.shape:
                raise InvalidInput(f"{path}: {entry.name} came as {array.dtype} of shape {array.shape}, not {entry}")
            file.write(array.tobytes() if not array.flags.c_contiguous else array.reshape(-1).view("u1").data)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(header) + sum(entry.bytes for entry in entries)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> bytes:
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        spans = [offset, offset + entry.bytes]
        content[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": spans}
        offset = spans[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
