"""A pack as tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus_common.engines.torch_model.attention import Segment
from nereus_common.rl.packing import Pack


@dataclass(frozen=True, slots=True, eq=False)
class PackTensors:
    """ids, positions [1, T]; rows, targets [R] as in `Pack`; source [R] on the CPU."""

    ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    rows: Tensor
    targets: Tensor
    source: Tensor


def to_tensors(pack: Pack, device: torch.device, dtype: torch.dtype) -> PackTensors:
    """`dtype` is that of the attention scores' mask."""

    def column(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device)

    return PackTensors(
        ids=column(pack.input_ids)[None],
        positions=column(pack.position_ids)[None],
        segments=tuple(_segment(pack, rows, device, dtype) for rows in pack.segments),
        rows=column(pack.logit_rows),
        targets=column(pack.targets),
        source=torch.as_tensor(pack.source),
    )


def _segment(pack: Pack, rows: slice, device: torch.device, dtype: torch.dtype) -> Segment:
    if pack.branch[rows].max() <= 1:
        return Segment(rows.start, rows.stop, None)
    visible = torch.as_tensor(pack.visible(rows))
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return Segment(rows.start, rows.stop, mask.to(device))
