"""Which copy within a unit is the one that counts: for norms, digests and checkpoints alike."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from nereus_common.engines.torch_model.shards import Shard
from nereus_common.engines.torch_model.stage import EMBEDDING, StageModel


def owned_here(model: StageModel, shard: Shard) -> bool:
    """Whether this rank owns its copy: the first tp rank does, and of a tied embedding the first pipeline stage.

    Over the ranks of one unit, the boxes of owned shards are disjoint and together everything.
    """
    world = model.world
    second_holder = model.tied and shard.name == EMBEDDING and not world.first_stage
    copied = world.place.tp > 0 and not _cut_over_tp(model.get_parameter(shard.parameter))
    return not second_holder and not copied


def _cut_over_tp(parameter: Tensor) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    if not isinstance(parameter, DTensor) or not names or "tp" not in names:
        return False
    return not parameter.placements[names.index("tp")].is_replicate()
