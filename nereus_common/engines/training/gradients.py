"""Local gradients made right across ranks, and their global norm.

After backward FSDP2 has summed over replicas and fs. What is left: weights that every tp rank holds whole but uses on
its own heads only, and the tied embedding, which the first and the last pipeline stage each use once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nereus_common.engines.torch_model.ownership import owned_here
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.stage import EMBEDDING, StageModel
from nereus_common.engines.torch_model.world import World

_PER_HEAD = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def collect_gradients(model: StageModel, shards: Sequence[Shard]) -> list[Tensor]:
    """Gradients of the shards, in their order, summed over everything that contributes; clears the model's own."""
    world = model.world
    gradients = []
    for shard in shards:
        parameter = model.get_parameter(shard.parameter)
        gradient = _local(parameter.grad, shard.local)
        parameter.grad = None
        if world.tensor_group is not None and shard.name.endswith(_PER_HEAD) and gradient.numel():
            dist.all_reduce(gradient, group=world.tensor_group)
        if model.tied and world.layout.pp > 1 and shard.name == EMBEDDING and gradient.numel():
            gradient += _other_use(gradient, world)
        gradients.append(gradient)
    return gradients


def global_norm(gradients: Sequence[Tensor], model: StageModel, shards: Sequence[Shard]) -> float:
    """L2 norm over the whole model, every logical element counted once; the same on every rank."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient, shard in zip(gradients, shards, strict=True):
        if gradient.numel() and model.world.replica == 0 and owned_here(model, shard):
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() ** 2
    dist.all_reduce(total)
    return float(total.sqrt())


def clip(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale so that the global norm is at most `limit`; 0: leave as they are."""
    if limit and norm > limit:
        torch._foreach_mul_(list(gradients), limit / norm)


def _local(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _other_use(gradient: Tensor, world: World) -> Tensor:
    """The gradient of the same shard from the other end of the pipeline."""
    peer = world.peer(world.layout.pp - 1 if world.first_stage else 0)
    theirs = torch.empty_like(gradient)
    ops = [dist.P2POp(dist.isend, gradient.contiguous(), peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return theirs
