"""What the benchmark `overlap` tries: pairs of changes that want each other's devices, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nereus_coordinator.fitting import rank_need

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import Dtypes, Plan, StagePlan
from nereus_common.state.architecture import ModelShape
from nereus_common.transitions.dag import EdgeKind, TransitionDag
from nereus_common.transitions.needs import InfeasibleTransition, RankNeed
from nereus_common.transitions.planner import plan_transition

ACTOR, CRITIC = ModelStage("actor", Stage.TRAINING), ModelStage("critic", Stage.TRAINING)
SCORER, REFERENCE = ModelStage("actor", Stage.INFERENCE), ModelStage("reference", Stage.INFERENCE)
KINDS: Mapping[str, tuple[ModelStage, ModelStage]] = {
    "same_model_cross_stage": (ACTOR, SCORER),
    "cross_model_same_stage": (ACTOR, CRITIC),
    "cross_model_cross_stage": (ACTOR, REFERENCE),
}
"""The paper's Table 5."""
DEVICES = tuple(DeviceId("node0", f"cpu{slot}") for slot in range(5))
ONE = "tp1.pp1.fs1"
LAYOUTS = {
    Stage.TRAINING: (ONE, f"{ONE} x2", "tp1.pp1.fs2", "tp2.pp1.fs1", "tp1.pp2.fs1"),
    Stage.INFERENCE: (ONE, f"{ONE} x2", "tp2.pp1.fs1", "tp1.pp2.fs1"),
}
FILLED = 0.7
"""Of a device, by the rank that needs most: two ranks never fit on one."""
DTYPES = Dtypes(compute="float32", kv="float32")


@dataclass(frozen=True, slots=True)
class Trial:
    """Two model-stages change at once. `mutual`: each wants a device that the other is on; else only one does."""

    kind: str
    number: int
    old: Plan
    new: Plan
    dag: TransitionDag
    mutual: bool

    @property
    def edges(self) -> int:
        """Resource edges: how often one waits for what another frees."""
        return sum(edge.kind is EdgeKind.RESOURCE for edge in self.dag.edges)


class Draws:
    """Trials with the model in `folder`, which stands for every model of a job."""

    def __init__(self, folder: Path) -> None:
        self._shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
        needs = (
            self._need(ModelStage("any", stage), _stage_plan(text, DEVICES), rank)
            for stage, texts in LAYOUTS.items()
            for text in texts
            for rank in range(parse_replicated(text)[0].ranks)
        )
        self.device_bytes = int(max(need.total for need in needs) / FILLED)

    def trial(self, kind: str, number: int) -> Trial:
        """The same one every time. Devices are drawn until both change, one at least comes to a device that the other
        is on, some order fits memory, and each would fit by itself if the other were not there."""
        rng, names = random.Random(f"{kind}/{number}"), KINDS[kind]
        while True:
            old, new = _plan(names, rng), _plan(names, rng)
            wants = _wants(old, new, *names)
            if any(wants) and all(self._dag(_only(old, name), _only(new, name)) for name in names):
                dag = self._dag(old, new)
                if dag is not None:
                    return Trial(kind, number, old, new, dag, all(wants))

    def _dag(self, old: Plan, new: Plan) -> TransitionDag | None:
        """None where no order fits memory, and where nothing changes."""
        try:
            dag = plan_transition(old, new, self._need, dict.fromkeys(DEVICES, self.device_bytes))
        except InfeasibleTransition:
            return None
        return dag if dag.nodes else None

    def _need(self, name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
        need: RankNeed = rank_need(self._shape, name, stage, rank)
        return need


def _only(plan: Plan, name: ModelStage) -> Plan:
    return Plan(((name, plan[name]),))


def _wants(old: Plan, new: Plan, one: ModelStage, other: ModelStage) -> tuple[bool, bool]:
    """Whether each comes to a device that the other is on."""
    return (
        not set(new[one].devices).isdisjoint(old[other].devices),
        not set(new[other].devices).isdisjoint(old[one].devices),
    )


def _plan(names: Sequence[ModelStage], rng: random.Random) -> Plan:
    """Random layouts on devices of their own."""
    left = rng.sample(DEVICES, len(DEVICES))
    stages = []
    for name in names:
        stage = _stage_plan(rng.choice(LAYOUTS[name.stage]), left)
        left = left[len(stage.devices) :]
        stages.append((name, stage))
    return Plan(tuple(stages))


def _stage_plan(text: str, devices: Sequence[DeviceId]) -> StagePlan:
    layout, replicas = parse_replicated(text)
    return replace(StagePlan(layout, tuple(devices[: layout.ranks * replicas]), replicas), dtypes=DTYPES)
