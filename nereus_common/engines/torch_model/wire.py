"""Copies of local shards in the dtype in which they cross the wire, as numpy arrays, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.state.digest import combine, digest_box

Pieces = dict[TensorName, list[tuple[Box, NDArray[Any]]]]

_BITS: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.int32),
    "bfloat16": (torch.bfloat16, torch.int16),
}


def wire_copies(held: Iterable[Shard], wire_dtype: str) -> Pieces:
    """Bit patterns (int32 or int16) of every non-empty shard; nothing shares storage with the parameters."""
    return {shard.name: [(shard.box, to_bits(shard.local, wire_dtype))] for shard in held if shard.box.elements}


def to_bits(tensor: Tensor, wire_dtype: str) -> NDArray[Any]:
    dtype, bits = wire_types(wire_dtype)
    copy = tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    array: NDArray[Any] = copy.view(bits).numpy()
    return array


def from_bits(array: NDArray[Any], wire_dtype: str) -> Tensor:
    """The inverse of `to_bits`, sharing the array's storage; `array` may be of any integer type of the right width."""
    dtype, bits = wire_types(wire_dtype)
    signed = array.view(np.int32 if bits is torch.int32 else np.int16)
    return torch.from_numpy(signed).view(dtype)


def wire_types(wire_dtype: str) -> tuple[torch.dtype, torch.dtype]:
    if wire_dtype not in _BITS:
        raise InvalidInput(f"wire dtype {wire_dtype}", remedy=f"use one of {', '.join(_BITS)}", field="wire_dtype")
    return _BITS[wire_dtype]


def digest_shards(held: Iterable[Shard], wire_dtype: str) -> int:
    """Digest of what the shards hold, one tensor at a time, in the wire dtype."""
    return combine(
        digest_box(shard.name, shard.shape, shard.box, to_bits(shard.local, wire_dtype))
        for shard in held
        if shard.box.elements
    )
