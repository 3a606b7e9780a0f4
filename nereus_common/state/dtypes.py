"""Element sizes of the dtypes that state is kept in and sent in."""

from __future__ import annotations

from nereus_common.core.errors import InvalidInput

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


def item_bytes(dtype: str) -> int:
    """Bytes per element; InvalidInput names a dtype that is not known."""
    if dtype not in ITEM_BYTES:
        raise InvalidInput(
            f"dtype {dtype!r} is unknown", remedy=f"one of {', '.join(sorted(ITEM_BYTES))}", field="dtype"
        )
    return ITEM_BYTES[dtype]
