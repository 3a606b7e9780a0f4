"""Of what the state of a training rank consists.

Logical tensors of a parameter `X` are `X`, `X:exp_avg` and `X:exp_avg_sq`, cut alike, and the 0-d `X:step`, whole on
every rank that has a share of `X` in its layout, an empty one too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.torch_model.live_state import Part, part_of, weight_parts
from nereus_common.engines.torch_model.ownership import owned_here
from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.stage import StageModel
from nereus_common.engines.training.optimizer import MOMENTS, Moments
from nereus_common.state.oracle import slot_name

STEP = "step"


def state_parts(model: StageModel, shards: Sequence[Shard], moments: Mapping[str, Moments]) -> dict[TensorName, Part]:
    """Parameters, moments and counters, those of one parameter together."""
    first = model.world.place.tp == 0 and model.world.place.fs == 0
    weights = weight_parts(model, shards)
    parts: dict[TensorName, Part] = {}
    for shard in shards:
        held, owned = moments[shard.name], owned_here(model, shard)
        parts[shard.name] = weights[shard.name]
        for slot in MOMENTS:
            parts[slot_name(shard.name, slot)] = part_of(slot, shard, getattr(held, slot), owned)
        size = held.step.untyped_storage().nbytes()
        parts[slot_name(shard.name, STEP)] = Part(STEP, (), Box((), ()), held.step, size, owned and first)
    return parts
