"""Digest of logical content: the same number for every layout that holds the same bits.

A logical tensor is seen as a matrix (leading dimensions flattened × last dimension; a 1-d tensor is one column, a 0-d
tensor one element). The element at (row, column) with bit pattern x adds

    a[row] · b[column] · (x + 1)   mod 2⁶⁴

where a and b are odd 64-bit weights made from the tensor's name. Sums over disjoint boxes add up to the sum over the
tensor, in any order; every single-bit change and every missing element, zeros included, changes the sum, because a
product of odd weights is invertible. It finds faults, not forgers. A matrix-vector product: about 1 ns per element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box

MASK = (1 << 64) - 1
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Words = NDArray[np.uint64]


def combine(digests: Iterable[int]) -> int:
    """The digest of the union of disjoint parts."""
    return sum(digests) & MASK


def digest_box(tensor: TensorName, shape: tuple[int, ...], box: Box, array: NDArray[Any]) -> int:
    """Digest of `array`, which holds `box` of the logical tensor of `shape`.

    `array.shape` is `box.shape`; its items have 1, 2, 4 or 8 bytes and count as bit patterns, so a bfloat16 array may
    come as a uint16 view. Strided arrays are read in place. InvalidInput when array, box and shape do not fit.
    """
    if len(box.stop) != len(shape) or any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
        raise InvalidInput(f"{tensor}: box {box} is not inside shape {shape}", field="box")
    if array.shape != box.shape or array.dtype.itemsize not in _BITS:
        raise InvalidInput(
            f"{tensor}{box} is of shape {box.shape}; the array is {array.dtype} of shape {array.shape}", field="array"
        )
    if not box.elements:
        return 0
    bits = array.view(_BITS[array.dtype.itemsize])
    seed = _seed(tensor)
    row_weights = _weights(seed, _rows(shape, box))
    if len(shape) < 2:
        columns = np.zeros(1, np.uint64)
        matrix = bits.reshape(-1, 1)
    else:
        columns = np.arange(box.start[-1], box.stop[-1], dtype=np.uint64)
        matrix = bits.reshape(-1, bits.shape[-1])
    return _bilinear(matrix, row_weights, _weights(seed ^ MASK, columns))


def digest_bytes(tensor: TensorName, shape: tuple[int, ...], box: Box, data: Any, item_bytes: int) -> int:
    """`digest_box` of a packed buffer: the elements of `box` in C order, `item_bytes` each."""
    if item_bytes not in _BITS:
        raise InvalidInput(f"items of {item_bytes} bytes cannot be digested", remedy="1, 2, 4 or 8", field="item_bytes")
    flat = np.frombuffer(data, _BITS[item_bytes])
    if flat.size != box.elements:
        raise InvalidInput(f"{tensor}{box} has {box.elements} elements, the buffer {flat.size}", field="data")
    return digest_box(tensor, shape, box, flat.reshape(box.shape))


def digest_state(
    shapes: Mapping[TensorName, tuple[int, ...]],
    held: Mapping[TensorName, Iterable[tuple[Box, NDArray[Any]]]],
) -> int:
    """Digest of all boxes of `held`, which are disjoint within a tensor."""
    return combine(digest_box(name, shapes[name], box, array) for name, parts in held.items() for box, array in parts)


def _seed(tensor: TensorName) -> int:
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8, person=b"nereus-digest").digest(), "little")


def _weights(seed: int, index: Words) -> Words:
    """Odd weights by index: splitmix64 (Steele, Lea and Flood, 2014) at positions `index` of the stream `seed`."""
    word = np.uint64(seed) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) | np.uint64(1)


def _rows(shape: tuple[int, ...], box: Box) -> Words:
    """The matrix row of each row of the box, in C order."""
    leading = len(shape) if len(shape) < 2 else len(shape) - 1
    rows = np.zeros(1, np.uint64)
    for axis in range(leading):
        along = np.arange(box.start[axis], box.stop[axis], dtype=np.uint64)
        rows = (rows[:, None] * np.uint64(shape[axis]) + along[None, :]).reshape(-1)
    return rows


def _bilinear(matrix: NDArray[Any], row_weights: Words, column_weights: Words) -> int:
    """Σ aᵣ b_c (x + 1), the "+ 1" apart: Σ aᵣ b_c x + (Σ aᵣ)(Σ b_c).

    einsum widens narrow items in a small buffer of its own, so no 64-bit copy of the matrix is made.
    """
    per_row = np.einsum("ij,j->i", matrix, column_weights)
    ones = int(row_weights.sum()) * int(column_weights.sum())
    return (int((per_row * row_weights).sum()) + ones) & MASK
