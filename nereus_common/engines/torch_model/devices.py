"""Where a rank's tensors live."""

from __future__ import annotations

import torch

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.plan import StagePlan
from nereus_common.engines.devices import CPU, slot_of


def own_device(plan: StagePlan, replica: int, rank: int) -> torch.device:
    """The rank's device in the plan, made this process's current one; InvalidPlan when PyTorch sees no such GPU."""
    device = plan.unit_devices(replica)[rank]
    kind, number = slot_of(device)
    if kind == CPU:
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    if number >= seen:
        raise InvalidPlan(
            f"device {device} is not there: PyTorch {torch.__version__} sees {seen} GPUs",
            remedy="correct the node's devices, or install the build of torch for its GPUs",
            field="devices",
        )
    own = torch.device("cuda", number)
    torch.cuda.set_device(own)
    return own
