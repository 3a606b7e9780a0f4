"""Float32 to the dtypes that models are published in, rounding to nearest, ties to even, as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.checkpoints.state import Array
from nereus_common.core.errors import InvalidInput

DTYPES = ("float32", "bfloat16", "float16")


def cast(array: Array, dtype: str, name: str) -> NDArray[Any]:
    """`array` in `dtype`; bfloat16 comes as uint16 bit patterns, because numpy has no such type.

    InvalidInput when a finite value of the tensor `name` does not fit.
    """
    if dtype == "float32":
        return array
    if dtype == "bfloat16":
        return _to_bfloat16(array)
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float16)
    if not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
        raise InvalidInput(
            f"{name} has values beyond {np.finfo(np.float16).max:g}", remedy="export as bfloat16", field="dtype"
        )
    return narrow


def _to_bfloat16(array: Array) -> NDArray[np.uint16]:
    """The upper half of the bits, after adding half of what is cut off (a little less where the result is even)."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    quiet = upper | np.uint32(0x40)  # a NaN stays one: the carry could make it an infinity
    return np.where(np.isnan(array), quiet, rounded).astype(np.uint16)
