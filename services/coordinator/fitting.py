"""Whether a plan can be reached from the one in force, and how: the pure planner, asked with what this pool has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.core.plan import StagePlan
from nereus_common.planning.memory import GENERATION_HOST, footprint, mirror_bytes, state_bytes
from nereus_common.registry import Registry
from nereus_common.state.architecture import ModelShape
from nereus_common.transitions.dag import TransitionDag
from nereus_common.transitions.needs import RankNeed
from nereus_common.transitions.planner import plan_transition
from nereus_common.transitions.traffic import LinkTraffic, traffic

from .placement import Placement, is_mirrored, model_shape


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a plan is reached, and what crosses which link on the way."""

    dag: TransitionDag
    shapes: Mapping[str, ModelShape]

    def traffic(self) -> tuple[LinkTraffic, ...]:
        """Compiles all transfer programs: up to seconds for a thousand ranks."""
        return traffic(self.dag, self.shapes)


async def fit(registry: Registry, old: Placement, target: Placement, bucket_bytes: int) -> Fitted:
    """The way from one placement to another. Raises what `plan_transition` raises where there is none."""
    shapes = {name: await model_shape(source) for name, source in target.models.items()}

    def needs(name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
        return rank_need(shapes[name.model], name, stage, rank, mirrored=is_mirrored(target, name))

    budgets = {device.id: device.memory_bytes for device in await registry.devices()}
    # its own units that its plan does not know are on their way out, and gone before anything is begun
    occupied = await registry.occupied(old.job)
    dag = plan_transition(old.plan, target.plan, needs, budgets, occupied=occupied, bucket_bytes=bucket_bytes)
    return Fitted(dag, shapes)


def rank_need(shape: ModelShape, name: ModelStage, stage: StagePlan, rank: int, *, mirrored: bool = False) -> RankNeed:
    """What a transition moves, and what the rank needs beside it."""
    state = state_bytes(shape, name, stage, rank)
    asleep = GENERATION_HOST if name.stage is Stage.GENERATION else 0
    total = footprint(shape, name, stage, rank).total + (mirror_bytes(shape, name, stage, rank) if mirrored else 0)
    return RankNeed(state=state, rest=total - state, asleep=asleep)
