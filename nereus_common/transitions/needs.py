"""What planning a transition has to be told, and what it says when it cannot be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nereus_common.core.errors import ResourceExhausted
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.plan import StagePlan

BUCKET_BYTES = 256 << 20
"""What a rank receives at once; an in-place move has one landing and one staged."""


class RankNeed(NamedTuple):
    """Bytes of one rank on its device. `state`: what makes its unit a holder (parameters, for training the optimizer's
    tensors too). `rest`: everything else it has (process, gradients, activations, KV cache, staging). `asleep`: the
    part of `rest` that a generation rank keeps while it sleeps."""

    state: int
    rest: int
    asleep: int = 0

    @property
    def total(self) -> int:
        return self.state + self.rest


Needs = Callable[[ModelStage, StagePlan, int], RankNeed]
"""(model-stage, its plan, rank within a unit) → what that rank needs."""


class InfeasibleTransition(ResourceExhausted):
    """No order of the primitives fits memory; nothing was moved. `details` name `device` and `bytes`, what it lacks."""

    def __init__(self, who: str, device: DeviceId, lacking: int, budget: int) -> None:
        super().__init__(
            f"{who} does not fit on {device} in any order: {lacking:,} bytes are lacking, of {budget:,}",
            remedy="free that device first, give it a larger budget, or choose a target that needs less there",
            device=device,
            bytes=lacking,
            field="plan",
        )
