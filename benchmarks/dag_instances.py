"""Transitions to plan: one of 1,024 devices, and seeded ones of jobs that fill their devices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.transitions.needs import InfeasibleTransition, Needs, RankNeed
from nereus_common.transitions.planner import plan_transition

GIB = 1 << 30
PARAMETERS = {"actor": 8e9, "critic": 8e9, "reference": 8e9, "reward": 8e9}
ACTOR, CRITIC = ModelStage("actor", Stage.TRAINING), ModelStage("critic", Stage.TRAINING)
ROLLOUT = ModelStage("actor", Stage.GENERATION)
REFERENCE, REWARD = ModelStage("reference", Stage.INFERENCE), ModelStage("reward", Stage.INFERENCE)
OCCUPANCY = 0.9
"""Of all devices' memory, in use before anything moves, at least."""
FILLED = 0.95
"""Of each device's memory, in use under the plan that needs more there."""


@dataclass(frozen=True, slots=True)
class Instance:
    old: Plan
    new: Plan
    needs: Needs
    budgets: Mapping[DeviceId, int]
    layers: Mapping[str, int]

    def start_use(self) -> dict[DeviceId, int]:
        """Bytes in use on each device before anything moves."""
        return use_of(self.old, self.needs)


def needs(name: ModelStage, plan: StagePlan, rank: int) -> RankNeed:
    """Of a dense model: bfloat16 to serve, float32 masters and Adam's moments to train, in even shards."""
    share = PARAMETERS[name.model] / plan.layout.ranks
    if name.stage is Stage.TRAINING:
        return RankNeed(int(12 * share), int(4 * share) + 2 * GIB)
    if name.stage is Stage.GENERATION:
        return RankNeed(int(2 * share), 9 * GIB, GIB)
    return RankNeed(int(2 * share), 2 * GIB)


def use_of(plan: Plan, needs: Needs) -> dict[DeviceId, int]:
    used: dict[DeviceId, int] = {}
    for name, stage in plan.stages:
        sizes = [needs(name, stage, rank).total for rank in range(stage.layout.ranks)]
        for place, device in enumerate(stage.devices):
            used[device] = used.get(device, 0) + sizes[place % stage.layout.ranks]
    return used


def pool(count: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(f"node{place // 8}", f"gpu{place % 8}") for place in range(count))


def large() -> Instance:
    """PPO over 1,024 devices: generation and training on all of them in turn, every model-stage changes its layout."""
    devices = pool(1024)
    half = 512
    old = _plan(
        {
            ROLLOUT: ("tp4.pp1.fs1", devices),
            REFERENCE: ("tp4.pp1.fs1", devices[:256]),
            REWARD: ("tp4.pp1.fs1", devices[256:half]),
            ACTOR: ("tp4.pp2.fs8", devices[:half]),
            CRITIC: ("tp4.pp2.fs8", devices[half:]),
        }
    )
    new = _plan(
        {
            ROLLOUT: ("tp8.pp1.fs1", devices),
            REFERENCE: ("tp8.pp1.fs1", devices[half : half + 256]),
            REWARD: ("tp8.pp1.fs1", devices[half + 256 :]),
            ACTOR: ("tp8.pp1.fs8", devices[half:]),
            CRITIC: ("tp8.pp1.fs8", devices[:half]),
        }
    )
    layers = dict.fromkeys(PARAMETERS, 32)
    return Instance(old, new, needs, _budgets(old, new, devices), layers)


def crowded(rng: random.Random, devices: int = 32) -> Instance:
    """A feasible transition between random plans of which the old one fills its devices, drawn from `rng`."""
    while True:
        where = pool(devices)
        old, new = _random_plan(rng, where), _random_plan(rng, where)
        instance = Instance(old, new, needs, _budgets(old, new, where), dict.fromkeys(PARAMETERS, 32))
        try:
            dag = plan_transition(old, new, needs, instance.budgets, layers=instance.layers)
        except InfeasibleTransition:
            continue
        if dag.nodes and occupancy(instance) >= OCCUPANCY:
            return instance


def occupancy(instance: Instance) -> float:
    return sum(instance.start_use().values()) / sum(instance.budgets.values())


def _budgets(old: Plan, new: Plan, devices: tuple[DeviceId, ...]) -> dict[DeviceId, int]:
    """As much as the plan that is fuller on a device needs there, and a twentieth of the device."""
    before, after = use_of(old, needs), use_of(new, needs)
    fuller = {device: max(before.get(device, 0), after.get(device, 0)) for device in devices}
    return {device: int(need / FILLED) for device, need in fuller.items()}


def _random_plan(rng: random.Random, devices: tuple[DeviceId, ...]) -> Plan:
    """Training on parts of the pool, inference and generation on others; in powers of two, as clusters are cut."""
    layouts = ["tp2.pp1.fs1", "tp4.pp1.fs1", "tp2.pp2.fs1", "tp8.pp1.fs1", "tp4.pp2.fs1"]
    quarter = len(devices) // 4
    parts = [devices[start : start + quarter] for start in range(0, len(devices), quarter)]
    rng.shuffle(parts)
    names = [ACTOR, CRITIC, REFERENCE, REWARD]
    stages = {name: (rng.choice(layouts), part) for name, part in zip(names, parts, strict=True)}
    stages[ROLLOUT] = (rng.choice(layouts), tuple(rng.sample(parts[2] + parts[3], 2 * quarter)))
    return _plan(stages)


def _plan(stages: Mapping[ModelStage, tuple[str, tuple[DeviceId, ...]]]) -> Plan:
    found = {}
    for name, (text, devices) in stages.items():
        layout = Layout.parse(text)
        limits = GenerationLimits() if name.stage is Stage.GENERATION else None
        replicas = len(devices) // layout.ranks
        found[name] = StagePlan(layout, devices[: replicas * layout.ranks], replicas, generation=limits)
    return Plan(tuple(found.items()), (tuple(found),))
