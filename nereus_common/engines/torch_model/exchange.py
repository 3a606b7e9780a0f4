"""A rank's side of moving weights: what it holds, what it pulled, and the staging in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.wire import from_bits
from nereus_common.state.dtypes import item_bytes
from nereus_common.transport.base import Raw, Transport
from nereus_common.transport.loopback import LoopbackTransport
from nereus_common.transport.ucx import UcxTransport


def open_transport(kind: str) -> Transport:
    """ucx, or loopback for ranks of one process; InvalidInput for any other kind."""
    if kind == "ucx":
        return UcxTransport()
    if kind == "loopback":
        return LoopbackTransport()
    raise InvalidInput(f"transport is {kind!r}", remedy="use ucx or loopback", field="transport")


class Staging:
    """Buffers for one version of some shards, filled piece by piece; the shards are untouched until `apply`."""

    def __init__(self, version: int, wire_dtype: str, shards: Sequence[Shard]) -> None:
        self.version, self.wire_dtype = version, wire_dtype
        self._shards = {shard.name: shard for shard in shards if shard.box.elements}
        bits = np.dtype(f"i{item_bytes(wire_dtype)}")
        self._buffers: dict[TensorName, NDArray[Any]] = {
            name: np.empty(shard.box.shape, bits) for name, shard in self._shards.items()
        }
        self._missing = {name: shard.box.elements for name, shard in self._shards.items()}

    def put(self, tensor: TensorName, box: Box, data: Raw) -> None:
        """A transport's sink: one verified piece inside a box that is held here."""
        shard = self._shards.get(tensor)
        if shard is None or not shard.box.contains(box):
            raise InvalidInput(f"{tensor}{box} was pulled and is not held here", field="transfers")
        buffer = self._buffers[tensor]
        buffer[box.relative_to(shard.box).slices] = data.view(buffer.dtype).reshape(box.shape)
        self._missing[tensor] -= box.elements

    def check_complete(self) -> None:
        """VerificationFailed names the tensors of which something is missing, or came twice."""
        wrong = {name: count for name, count in self._missing.items() if count}
        if wrong:
            name, count = next(iter(wrong.items()))
            raise VerificationFailed(
                f"version {self.version}: {len(wrong)} tensors were not pulled whole; {name} lacks {count} elements",
                remedy="the transfer program must cover every held box exactly once",
            )

    def apply(self) -> None:
        """Write everything to the shards, casting to their dtype; drops the buffers."""
        for name, buffer in self._buffers.items():
            self._shards[name].local.copy_(from_bits(buffer, self.wire_dtype))
        self._buffers = {}
