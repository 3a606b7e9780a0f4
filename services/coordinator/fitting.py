"""Whether a plan can be reached from the one in force, and how: the pure planner, asked with what this pool has."""

from __future__ import annotations

from collections.abc import Mapping

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.plan import StagePlan
from nereus_common.planning.memory import footprint
from nereus_common.registry import Registry
from nereus_common.state.architecture import ModelShape
from nereus_common.transitions.dag import TransitionDag
from nereus_common.transitions.needs import RankNeed
from nereus_common.transitions.planner import plan_transition

from .jobs import PlacedJob
from .placement import Placement, model_shape


async def fit(registry: Registry, placed: PlacedJob, target: Placement) -> TransitionDag:
    """The DAG from the job's plan to the target's. Raises what `plan_transition` raises where there is no way."""
    shapes = {name: await model_shape(source) for name, source in target.models.items()}

    def needs(name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
        return rank_need(shapes[name.model], name, stage, rank)

    budgets = {device.id: device.memory_bytes for device in await registry.devices()}
    occupied = await _by_others(registry, placed)
    return plan_transition(placed.placement.plan, target.plan, needs, budgets, occupied=occupied)


def rank_need(shape: ModelShape, name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
    """What a transition moves, and what the rank needs beside it. Training holds its masters and two moments of the
    same size; what it computes with is made from them."""
    found = footprint(shape, name, stage, rank)
    state = found.optimizer * 3 // 2 if name.stage is Stage.TRAINING else found.weights
    return RankNeed(state=state, rest=found.total - state)


async def _by_others(registry: Registry, placed: PlacedJob) -> Mapping[DeviceId, int]:
    """Bytes granted to units of other jobs, by device."""
    mine = {unit.id for unit in placed.units}
    used: dict[DeviceId, int] = {}
    for grant in await registry.grants():
        if grant.unit not in mine:
            used[grant.device] = used.get(grant.device, 0) + grant.bytes
    return used
