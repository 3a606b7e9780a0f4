"""A forward pass without gradients over packs, handed from one pipeline stage to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.torch_model.stage import StageModel


@torch.no_grad()
def forward_packs(
    model: StageModel, packs: Sequence[PackTensors], dtype: torch.dtype, take: Callable[[int, Tensor], None]
) -> None:
    """`take(pack index, what the last stage gives)`, in order, on the ranks of the last stage; `dtype` is the compute
    dtype. The same kernels on the same shapes as a pass with gradients. Parameters that are gathered stay so."""
    model.packs = packs
    try:
        for index, pack in enumerate(packs):
            output = _through(model, index, pack, dtype)
            if model.world.last_stage:
                take(index, output)
            else:
                dist.send(output.contiguous(), model.world.peer(model.world.place.pp + 1))
    finally:
        model.packs = ()


def _through(model: StageModel, index: int, pack: PackTensors, dtype: torch.dtype) -> Tensor:
    value, world = pack.ids, model.world
    if not world.first_stage:
        value = torch.empty(1, pack.ids.shape[1], model.hidden_size, dtype=dtype, device=pack.ids.device)
        dist.recv(value, world.peer(world.place.pp - 1))
    output: Tensor = model(value, torch.tensor(index))
    return output
