"""Pulled boxes of one version, waiting to be loaded: host memory, apart from anything the engine uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nereus_common.core.errors import VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation.base import RankPull, WeightOrder
from nereus_common.engines.generation.folder import read_boxes
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport import PullRequest, Transport

Shapes = Mapping[TensorName, tuple[int, ...]]
Boxes = Mapping[TensorName, tuple[Box, ...]]

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_WORD = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


class Staging:
    """Room for one rank's boxes of one version, as bit patterns of `wire_dtype`.

    `fill` is the transport's sink: pieces of the boxes arrive in any order. That they cover them is checked before
    (`check_cover`).
    """

    def __init__(self, version: int, wire_dtype: str, shapes: Shapes, boxes: Boxes) -> None:
        self.version = version
        self.wire_dtype = wire_dtype
        self.shapes = shapes
        self._word = np.dtype(_WORD[wire_dtype])
        self._held: dict[TensorName, tuple[tuple[Box, NDArray[Any]], ...]] = {
            tensor: tuple((box, np.zeros(box.shape, self._word)) for box in held) for tensor, held in boxes.items()
        }

    @property
    def item_bytes(self) -> int:
        return self._word.itemsize

    def fill(self, tensor: TensorName, box: Box, data: NDArray[Any]) -> None:
        """Place a piece: `data` holds the items of `box` in C order, as bytes or as items."""
        for outer, array in self._held[tensor]:
            if outer.contains(box):
                array[box.relative_to(outer).slices] = data.reshape(-1).view(self._word).reshape(box.shape)
                return
        raise VerificationFailed(f"{tensor}{box} arrived, which was not asked for", tensor=tensor, box=box)

    def tensors(self) -> Iterable[TensorName]:
        return self._held

    def boxes(self, tensor: TensorName) -> tuple[tuple[Box, NDArray[Any]], ...]:
        """The boxes of a tensor with their bits."""
        return self._held[tensor]

    def digests(self) -> dict[TensorName, int]:
        """Of every tensor's staged boxes together."""
        return {
            tensor: combine(digest_box(tensor, self.shapes[tensor], box, array) for box, array in held)
            for tensor, held in self._held.items()
        }

    def shown_bits(self, tensor: TensorName, box: Box, read: NDArray[Any]) -> NDArray[Any]:
        """`read`, a matrix seen through a product with the identity, with what a product cannot show put back.

        A sum loses the sign of a zero, and kernels may flush subnormals: where zero was read and zero or a subnormal
        was staged, the staged bits stand.
        """
        mask = self._word.type(_EXPONENT[self.wire_dtype])
        vague = (read & mask) == 0
        if not vague.any():
            return read
        staged = np.zeros(box.shape, self._word)
        for outer, array in self._held[tensor]:
            common = outer.intersect(box)
            if common is not None:
                staged[common.relative_to(box).slices] = array[common.relative_to(outer).slices]
        return np.where(vague & ((staged & mask) == 0), staged, read)


def check_cover(wanted: Boxes, offered: Mapping[TensorName, tuple[Box, ...]]) -> None:
    """VerificationFailed unless the offered boxes cover every wanted element exactly once, and no other."""
    for tensor in wanted.keys() | offered.keys():
        need, given = wanted.get(tensor, ()), offered.get(tensor, ())
        inside = all(any(outer.contains(box) for outer in need) for box in given)
        apart = all(a.intersect(b) is None for i, a in enumerate(given) for b in given[i + 1 :])
        if not (inside and apart and sum(b.elements for b in given) == sum(b.elements for b in need)):
            raise VerificationFailed(
                f"{tensor}: {', '.join(map(str, given)) or 'nothing'} is offered where "
                f"{', '.join(map(str, need)) or 'nothing'} is needed",
                remedy="compile the transfer program from the boxes this unit describes",
                tensor=tensor,
            )


def stage(staging: Staging, order: WeightOrder, rank: int, transport: Transport) -> RankPull:
    """Pull what `order` has for `rank` into `staging`; raises what the transport or the folder raises."""
    items = order.items[rank]
    if order.folder is not None:
        moved, seconds = read_boxes(order.folder, items, getattr(torch, order.wire_dtype), staging.fill)
    else:
        request = PullRequest(
            order.version, items, staging.item_bytes, order.deadline, order.transition, order.wire_dtype
        )
        report = transport.pull(request, staging.fill)
        moved, seconds = report.moved_bytes, report.seconds
    return RankPull(rank, moved, seconds, combine(staging.digests().values()))
