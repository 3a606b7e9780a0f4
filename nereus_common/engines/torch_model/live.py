"""Tensors served, written, freed and given storage again where they are, on any device."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus_common.transport.base import Raw

Index = tuple[slice, ...] | EllipsisType
Served = Any
"""What a transport can read: a numpy array, or a `DeviceArray`, which has of one what a transport uses."""


class DeviceArray:
    """A tensor on another device, read by slices: each is copied to the CPU when it is asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def __getitem__(self, index: Index) -> NDArray[Any]:
        array: NDArray[Any] = self._tensor[index].contiguous().cpu().numpy()
        return array


def served(tensor: Tensor) -> Served:
    """`tensor` as the transport serves it, without a copy; bfloat16, which numpy lacks, as its bit patterns.

    Not by `Tensor.numpy`, which pins the storage at its size for good: it must be possible to free it.
    """
    shown = tensor.detach()
    if shown.dtype is torch.bfloat16:
        shown = shown.view(torch.int16)
    return np.from_dlpack(shown) if shown.device.type == "cpu" else DeviceArray(shown)


def write(tensor: Tensor, data: Raw) -> None:
    """Fill `tensor` from bytes of its dtype in C order."""
    tensor.copy_(torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape))


def free(tensor: Tensor) -> None:
    """Give the storage back; whatever shares it is empty from then on. Nobody may read it any more."""
    tensor.untyped_storage().resize_(0)


def materialize(tensor: Tensor, storage_bytes: int) -> None:
    """Give a freed tensor its storage of `storage_bytes` again, of undefined content; padding behind it is zero."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == storage_bytes:
        return
    storage.resize_(storage_bytes)
    if storage_bytes > tensor.numel() * tensor.element_size():
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage).zero_()
