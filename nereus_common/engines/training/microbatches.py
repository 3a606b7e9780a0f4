"""Forward and backward over the packs of one update, on one stage or through a 1F1B pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from nereus_common.engines.torch_model.build import fsdp_modules
from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.torch_model.stage import StageModel

LossOf = Callable[[int, Tensor], Tensor]
"""(pack index, [1, 2, R] log-probs and entropies or [1, 1, R] values) → 0-d loss."""


def accumulate_gradients(model: StageModel, packs: Sequence[PackTensors], loss_of: LossOf, dtype: torch.dtype) -> None:
    """Sum the gradients of all packs and reduce them once, at the end; at least as many packs as pipeline stages.

    The parameters are gathered, and cast to the compute dtype `dtype`, at the first pack unless a pass before did so,
    and dropped after the last: the next update gathers what this one leaves.
    """
    model.packs = packs
    try:
        if model.world.layout.pp == 1:
            _one_stage(model, packs, loss_of)
        else:
            _pipeline(model, packs, loss_of, dtype)
    finally:
        model.packs = ()
    for module in fsdp_modules(model):
        module.reshard()


def _one_stage(model: StageModel, packs: Sequence[PackTensors], loss_of: LossOf) -> None:
    assert isinstance(model, FSDPModule)
    for index, pack in enumerate(packs):
        last = index == len(packs) - 1
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        scores = model(pack.ids, torch.tensor(index))
        loss_of(index, scores).backward()  # type: ignore[no-untyped-call]


def _pipeline(model: StageModel, packs: Sequence[PackTensors], loss_of: LossOf, dtype: torch.dtype) -> None:
    world, count = model.world, len(packs)
    rows, predictions = packs[0].ids.shape[1], len(packs[0].targets)
    hidden = torch.empty(1, rows, model.hidden_size, dtype=dtype, device="meta", requires_grad=True)
    stage = PipelineStage(
        model,
        world.place.pp,
        world.layout.pp,
        packs[0].ids.device,
        input_args=torch.empty(1, rows, dtype=torch.int64, device="meta") if world.first_stage else hidden,
        output_args=torch.empty(1, model.output_rows, predictions, device="meta") if world.last_stage else hidden,
        group=world.mesh.get_group("pp"),
    )
    schedule = Schedule1F1B(stage, count, loss_fn=lambda scores, index: loss_of(int(index), scores), scale_grads=False)
    index = torch.arange(count)
    inputs = (torch.cat([pack.ids for pack in packs]),) if world.first_stage else ()
    schedule.step(*inputs, index=index, target=index if world.last_stage else None, return_outputs=False)
