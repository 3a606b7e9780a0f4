"""Which box of which logical tensor a rank holds, asked of DTensor itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.stage import StageModel


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """`local` is this rank's part of the parameter, sharing its storage; `box` may be empty. `shape`: the whole's."""

    name: TensorName
    parameter: str
    shape: tuple[int, ...]
    box: Box
    local: Tensor


def shards(model: StageModel) -> tuple[Shard, ...]:
    """The rank's shards in the model's order, a tied tensor once."""
    found = []
    for name, parameter in model.named_parameters():
        box, local = box_of(parameter)
        found.append(Shard(model.logical_name(name), name, tuple(parameter.shape), box, local))
    return tuple(found)


def box_of(tensor: Tensor) -> tuple[Box, Tensor]:
    """The box of a whole tensor that is here, and the local part, detached."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape)), tensor.detach()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: Tensor = tensor.to_local().detach()
    start = offset if local.numel() else tuple(0 for _ in shape)
    return Box(tuple(start), tuple(a + b for a, b in zip(start, local.shape, strict=True))), local
