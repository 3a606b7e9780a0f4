"""Columns survive being cut, and whatever does not add up is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from nereus.v1.columns_pb2 import ColumnChunk
from nereus_common.core.errors import InvalidInput
from nereus_common.rpc.columns import DTYPES, Columns, chunks_from_columns, columns_from_chunks

pytestmark = pytest.mark.fast

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
)


def collect(chunks: Sequence[ColumnChunk], max_bytes: int = 1 << 20) -> dict[str, NDArray[Any]]:
    columns = Columns(max_bytes)
    for chunk in chunks:
        columns.add(chunk)
    return columns.finish()


@given(st.dictionaries(st.text(min_size=1, max_size=8), arrays, max_size=4), st.integers(1, 50))
def test_columns_are_the_same_after_the_wire(columns: dict[str, NDArray[Any]], chunk_bytes: int) -> None:
    got = collect(list(chunks_from_columns(columns, chunk_bytes)))
    assert list(got) == list(columns)
    for name, array in columns.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def test_views_and_foreign_byte_orders_travel_by_value() -> None:
    strided = np.arange(24).reshape(4, 6)[:, ::2]
    got = collect(list(chunks_from_columns({"strided": strided, "big": np.arange(3, dtype=">i4")})))
    np.testing.assert_array_equal(got["strided"], strided)
    np.testing.assert_array_equal(got["big"], [0, 1, 2])
    assert got["big"].flags.writeable


async def test_a_stream_is_collected_to_its_end() -> None:
    async def stream() -> AsyncIterator[ColumnChunk]:
        for chunk in chunks_from_columns({"a": np.arange(10)}, 7):
            yield chunk

    np.testing.assert_array_equal((await columns_from_chunks(stream()))["a"], np.arange(10))


def piece(**fields: Any) -> ColumnChunk:
    whole: dict[str, Any] = {"name": "a", "dtype": "int32", "shape": [4], "offset": 0, "data": bytes(16)}
    return ColumnChunk(**(whole | fields))


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(dtype="object")], "'object' is not accepted"),
        ([piece(dtype="<U4")], "is not accepted"),
        ([piece(name="")], "no name"),
        ([piece(shape=[1] * 9)], "9 dimensions"),
        ([piece(shape=[1 << 40, 1 << 40])], "bytes are over"),
        ([piece(data=bytes(12))], "12 of 16 bytes arrived"),
        ([piece(data=bytes(20))], "a piece of 20 bytes"),
        ([piece(data=b"")], "a piece of 0 bytes"),
        ([piece(data=bytes(8)), piece(offset=12, data=bytes(4))], "begins at byte 12, not 8"),
        ([piece(), piece(offset=16, data=b"")], "follows its last one"),
        ([piece(data=bytes(8)), piece(offset=8, data=bytes(8), shape=[2, 2])], "the first was another"),
        ([piece(dtype="bool", shape=[2], data=b"\1\2")], "neither 0 nor 1"),
    ],
)
def test_pieces_that_do_not_add_up_are_refused_by_column(pieces: list[ColumnChunk], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        collect(pieces)
    assert caught.value.details["field"] == pieces[0].name


def test_the_bound_holds_for_all_columns_together() -> None:
    with pytest.raises(InvalidInput, match="'b'"):
        collect([piece(), piece(name="b")], max_bytes=31)


def test_too_many_columns_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="64 columns"):
        collect([piece(name=f"c{number}") for number in range(65)])
    with pytest.raises(InvalidInput, match="complex128 does not travel"):
        list(chunks_from_columns({"c": np.zeros(1, np.complex128)}))
