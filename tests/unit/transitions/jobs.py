"""Random jobs under memory pressure, and a witness of the memory check: the DAG run in a random order it allows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.transitions.dag import Mode, Node, Primitive, Side, TransitionDag, UnitSlot
from nereus_common.transitions.needs import RankNeed

BUCKET = 3
ACTOR, CRITIC = ModelStage("actor", Stage.TRAINING), ModelStage("critic", Stage.TRAINING)
ROLLOUT, SCORE = ModelStage("actor", Stage.GENERATION), ModelStage("actor", Stage.INFERENCE)
REFERENCE = ModelStage("reference", Stage.INFERENCE)
STATE = {ACTOR: 240, CRITIC: 120, ROLLOUT: 60, SCORE: 60, REFERENCE: 60}
REST = {ACTOR: 20, CRITIC: 20, ROLLOUT: 90, SCORE: 10, REFERENCE: 10}
LAYOUTS = [Layout.parse(text) for text in ("tp1.pp1.fs1", "tp2.pp1.fs1", "tp1.pp2.fs1", "tp3.pp1.fs1", "tp1.pp1.fs2")]


def pool(count: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(f"node{place // 4}", f"gpu{place % 4}") for place in range(count))


def needs(name: ModelStage, plan: StagePlan, rank: int) -> RankNeed:
    asleep = 5 if name.stage is Stage.GENERATION else 0
    return RankNeed(STATE[name] // plan.layout.ranks, REST[name], asleep)


def stage(name: ModelStage, layout: str | Layout, devices: tuple[DeviceId, ...]) -> StagePlan:
    """As many units of `layout` as fit on `devices`."""
    cut = Layout.parse(layout) if isinstance(layout, str) else layout
    limits = GenerationLimits() if name.stage is Stage.GENERATION else None
    replicas = len(devices) // cut.ranks
    return StagePlan(cut, devices[: replicas * cut.ranks], replicas, generation=limits)


def plan(stages: Mapping[ModelStage, StagePlan]) -> Plan:
    """All model-stages may share devices."""
    return Plan(tuple(stages.items()), (tuple(stages),))


def random_plan(rng: random.Random, names: list[ModelStage], devices: tuple[DeviceId, ...]) -> Plan:
    stages = {}
    for name in names:
        layout = rng.choice(LAYOUTS)
        mine = rng.sample(devices, rng.randint(layout.ranks, len(devices)))
        stages[name] = stage(name, layout, tuple(mine))
    return plan(stages)


def usage(of: Plan) -> dict[DeviceId, int]:
    used: dict[DeviceId, int] = {}
    for name, entry in of.stages:
        for place, device in enumerate(entry.devices):
            used[device] = used.get(device, 0) + needs(name, entry, place % entry.layout.ranks).total
    return used


@dataclass
class Witness:
    """Runs a DAG event by event. `use` and `peaks` in bytes; `intact` units that hold their whole state."""

    dag: TransitionDag
    use: dict[DeviceId, int]
    peaks: dict[DeviceId, int] = field(default_factory=dict)
    intact: set[UnitSlot] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, dag: TransitionDag) -> Witness:
        use = dict.fromkeys(dag.budgets, 0) | usage(dag.old)
        olds = {
            UnitSlot(name, Side.OLD, replica) for name, entry in dag.old.stages for replica in range(entry.replicas)
        }
        return cls(dag, use, dict(use), olds)

    def run(self, rng: random.Random) -> None:
        while len(self.done) < len(self.dag.nodes):
            able = [
                node
                for node in self.dag.nodes
                if node.id not in self.done | self.running and self.done.issuperset(self.dag.before(node.id))
            ]
            if able and (not self.running or rng.random() < 0.5):
                self._start(rng.choice(able))
            else:
                assert self.running, "the DAG is stuck"
                self._finish(self.dag.nodes[rng.choice(sorted(self.running))])
            self._check()

    def _start(self, node: Node) -> None:
        self.running.add(node.id)
        assert self.intact.issuperset(node.sources) or self._asleep(node), "a source has ended"
        if node.primitive is Primitive.DESTROY or node.mode is Mode.IN_PLACE:
            self.intact.difference_update(node.sources)
        if node.primitive is not Primitive.DESTROY:
            self._add(self._during(node), 1)

    def _finish(self, node: Node) -> None:
        self.running.remove(node.id)
        self.done.add(node.id)
        self.intact.update(node.targets)
        during = {} if node.primitive is Primitive.DESTROY else self._during(node)
        touched = {**during, **node.frees}
        change = {
            device: node.acquires.get(device, 0) - node.frees.get(device, 0) - during.get(device, 0)
            for device in touched
        }
        self._add(change, 1)

    def _asleep(self, node: Node) -> bool:
        """A sleeping unit may be ended, and put to sleep again by the next unit that moves in."""
        consumed = {slot for other in self.dag.nodes if other.mode is Mode.IN_PLACE for slot in other.sources}
        missing = set(node.sources) - self.intact
        return missing <= consumed and (
            node.primitive is Primitive.DESTROY or node.model_stage.stage is Stage.GENERATION
        )

    def _during(self, node: Node) -> dict[DeviceId, int]:
        if node.mode is Mode.SHADOW:
            return dict(node.acquires)
        if node.model_stage.stage is Stage.GENERATION:
            return {device: size - node.frees.get(device, 0) for device, size in node.acquires.items()}
        new = self.dag.new[node.model_stage]
        rest = REST[node.model_stage]
        return {
            device: max(0, STATE[node.model_stage] // new.layout.ranks - node.frees.get(device, 0)) + rest + 2 * BUCKET
            for device in node.acquires
        }

    def _add(self, sizes: Mapping[DeviceId, int], sign: int) -> None:
        for device, size in sizes.items():
            self.use[device] += sign * size
            self.peaks[device] = max(self.peaks[device], self.use[device])

    def _check(self) -> None:
        trained = {name.model for name in self.dag.old.names if name.stage is Stage.TRAINING}
        for name in self.dag.old.names:
            if name.stage is Stage.TRAINING or name.model not in trained:
                moving = any(
                    self.dag.nodes[number].model_stage == name and self.dag.nodes[number].mode is Mode.IN_PLACE
                    for number in self.running
                )
                assert moving or any(slot.model_stage == name for slot in self.intact), f"{name} has no holder"
