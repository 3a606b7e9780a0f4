"""The search, against every plan there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from types import MappingProxyType

import pytest

from nereus_common.core.errors import ResourceExhausted
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.core.workflow import rl_workflow
from nereus_common.planning.demand import Demand
from nereus_common.planning.hardware import Cluster, NodeKind, Processor
from nereus_common.planning.job import Job, sync_demand, task_demand
from nereus_common.planning.memory import device_bytes, footprint
from nereus_common.planning.placements import Placements
from nereus_common.planning.pools import HEADROOM
from nereus_common.planning.question import Question
from nereus_common.planning.search import NEAR, search
from nereus_common.planning.space import Pool, row_plan, space
from nereus_common.planning.step_time import place_of, step_time
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

MODEL = ModelShape("llama", 4, 1024, 2816, 8, 4, 128, 32000, tied=True)
GIGABYTES = 1 << 30
CHIP = Processor("chip", MappingProxyType({"float32": 2e12, "bfloat16": 2e13}), 16 * GIGABYTES, 4e11)
DEVICES = 3
WORK = Workload(16, 4, 60, (50.0, 150.0, 400.0))


def cluster(nodes: int, devices: int, memory: float, name: str = "chip") -> Cluster:
    processor = replace(CHIP, name=name, memory_bytes=int(memory * GIGABYTES))
    return Cluster({f"node{number}": NodeKind(processor, devices, 5e10, 1e10) for number in range(nodes)})


def question(pool: Cluster, *, critic: bool = False, reference: bool = True, staleness: int | None = None) -> Question:
    workflow = rl_workflow(critic=critic, reference=reference)
    job = Job(workflow, dict.fromkeys(workflow.model_stages, MODEL), WORK, {"reward functions": 0.01})
    return Question(job, pool, {name: (knobs(name, pool),) for name in workflow.model_stages}, staleness=staleness)


def knobs(name: ModelStage, pool: Cluster) -> StagePlan:
    limits = GenerationLimits(max_sequences=16, kv_bytes=GIGABYTES // 2) if name.stage is Stage.GENERATION else None
    return StagePlan(Layout(), pool.devices[:1], microbatch_tokens=2048, generation=limits)


@dataclass(frozen=True)
class Alone:
    """A model-stage on the first devices, priced by itself: seconds by task, and of the weight sync."""

    plan: StagePlan
    bytes: list[int]
    seconds: dict[str, float]
    sync: float


def priced(asked: Question, name: ModelStage) -> list[Alone]:
    devices, kind = asked.cluster.devices, next(iter(asked.cluster.nodes.values()))
    rows = space(MODEL, name, Pool(kind, len(devices)), asked.knobs[name][0])
    plans = [row_plan(rows, row, asked.knobs[name][0], devices) for row in range(len(rows.tp))]
    return [alone(asked, name, plan) for plan in plans]


def alone(asked: Question, name: ModelStage, plan: StagePlan) -> Alone:
    job, placed = asked.job, Placements.of(MODEL, name, [plan], asked.cluster)

    def seconds(demand: Demand) -> float:
        return asked.calibration.predict({key: float(column[0]) for key, column in demand.items()}).seconds

    tasks = {task.name: seconds(task_demand(job, task, placed)) for task in job.workflow.tasks if task.stage == name}
    needs = [footprint(MODEL, name, plan, rank).total for rank in range(plan.layout.ranks)]
    return Alone(plan, needs * plan.replicas, tasks, seconds(sync_demand(placed)) if job.is_synced(name) else 0.0)


def best_of_all(asked: Question) -> float:
    """Over all plans on one node whose model-stages stand in groups, on neighbouring devices, from their first on."""
    names, budget = asked.job.workflow.model_stages, (1 - HEADROOM) * asked.cluster.budget(asked.cluster.devices[0])
    best = float("inf")
    for choice in product(*(priced(asked, name) for name in names)):
        chosen = dict(zip(names, choice, strict=True))
        seconds = {task: value for one in choice for task, value in one.seconds.items()} | dict(asked.job.elsewhere)
        for groups in partitions(list(names)):
            starts = starting(groups, chosen)
            if starts is not None and allowed(asked, groups) and fits(groups, chosen, budget):
                places = {name: devices_of(asked, chosen[name], starts[name]) for name in names}
                sync = sum(one.sync for one in choice)
                flight = asked.staleness is not None
                found = step_time(asked.job.workflow, seconds, places, sync, asynchronous=flight)
                best = min(best, found.total)
    return best


def starting(groups: list[list[ModelStage]], chosen: dict[ModelStage, Alone]) -> dict[ModelStage, int] | None:
    start, starts = 0, {}
    for group in groups:
        starts |= dict.fromkeys(group, start)
        start += max(len(chosen[name].plan.devices) for name in group)
    return starts if start <= DEVICES else None


def allowed(asked: Question, groups: list[list[ModelStage]]) -> bool:
    lonely = asked.staleness is None
    return lonely or all(len(group) == 1 for group in groups if any(name.stage is Stage.GENERATION for name in group))


def fits(groups: list[list[ModelStage]], chosen: dict[ModelStage, Alone], budget: float) -> bool:
    return all(
        sum(needs) <= budget
        for group in groups
        for needs in zip_longest(*(chosen[name].bytes for name in group), fillvalue=0)
    )


def devices_of(asked: Question, one: Alone, start: int) -> frozenset[str]:
    return frozenset(map(place_of, asked.cluster.devices[start : start + len(one.plan.devices)]))


def partitions(names: list[ModelStage]) -> Iterator[list[list[ModelStage]]]:
    if not names:
        yield []
        return
    first, *others = names
    for groups in partitions(others):
        yield [[first], *groups]
        for number, group in enumerate(groups):
            yield [*groups[:number], [first, *group], *groups[number + 1 :]]


@pytest.mark.parametrize("staleness", [None, 1], ids=["sync", "async"])
@pytest.mark.parametrize("memory", [5.0, 6.5, 9.0, 16.0])
@pytest.mark.parametrize("name", ["chip", "cpu"])
def test_no_plan_is_better_than_the_one_that_is_found(memory: float, name: str, staleness: int | None) -> None:
    asked = question(cluster(1, DEVICES, memory, name), staleness=staleness)
    found = search(asked).found[0]
    assert found.cost.seconds == pytest.approx(best_of_all(asked), rel=1e-9)


@pytest.mark.parametrize("memory", [7.0, 12.0])
def test_nor_is_one_for_a_critic_too(memory: float) -> None:
    asked = question(cluster(1, DEVICES, memory), critic=True, reference=False)
    assert search(asked).found[0].cost.seconds == pytest.approx(best_of_all(asked), rel=1e-9)


@pytest.mark.parametrize("memory", [5.0, 9.0])
def test_what_is_found_fits_memory_with_headroom(memory: float) -> None:
    asked = question(cluster(2, 4, memory), critic=True)
    for found in search(asked, 5).found:
        used = device_bytes(found.plan, asked.job.shapes)
        assert max(used.values()) <= (1 - HEADROOM) * memory * GIGABYTES


def test_plans_beside_the_best_are_others_and_nearly_as_good() -> None:
    found = search(question(cluster(2, 4, 12.0)), 4).found
    assert len({one.plan for one in found}) == len(found) > 1
    seconds = [one.cost.seconds for one in found]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= (1 + NEAR) * seconds[0]


def test_a_model_stage_that_stays_keeps_its_devices() -> None:
    asked = question(cluster(2, 4, 16.0))
    first = search(asked).found[0].plan
    turned = Plan(
        tuple((name, replace(stage, devices=moved(stage.devices))) for name, stage in first.stages), first.colocated
    )
    again = search(replace(asked, present=turned)).found[0].plan
    assert again == turned


def moved(devices: tuple[DeviceId, ...]) -> tuple[DeviceId, ...]:
    """The same slots of the other node."""
    other = {"node0": "node1", "node1": "node0"}
    return tuple(DeviceId(other[device.node], device.slot) for device in devices)


def test_a_pinned_model_stage_keeps_its_layout() -> None:
    asked, name = question(cluster(1, 4, 16.0)), ModelStage.parse("actor/training")
    for layout, replicas in ((Layout(2, 2, 1), 1), (Layout(1, 1, 1), 3)):
        stage = replace(
            asked.knobs[name][0],
            layout=layout,
            replicas=replicas,
            devices=asked.cluster.devices[: layout.ranks * replicas],
        )
        plan = search(replace(asked, pinned={name: stage})).found[0].plan
        assert (plan[name].layout, plan[name].replicas) == (layout, replicas)


def test_devices_that_may_not_be_used_are_not() -> None:
    asked = question(cluster(2, 4, 16.0))
    usable = frozenset(asked.cluster.devices[:3] + asked.cluster.devices[4:7])
    assert set(search(replace(asked, usable=usable)).found[0].plan.devices) <= usable


def test_slower_devices_of_a_mixed_pool_are_left_to_what_they_slow_down_least() -> None:
    """With devices that hardly compute beside good ones, none of the work that counts goes there."""
    fast, slow = (
        cluster(1, 4, 16.0),
        replace(CHIP, name="old", flops=MappingProxyType({"float32": 1e9}), memory_rate=1e9),
    )
    nodes = {**fast.nodes, "node9": NodeKind(slow, 4, 5e10, 1e10)}
    alone, mixed = search(question(fast)).found[0], search(question(Cluster(nodes))).found[0]
    assert mixed.cost.seconds == pytest.approx(alone.cost.seconds)
    assert all(device.node == "node0" for device in mixed.plan.devices)


def test_a_job_that_fits_nowhere_is_refused_with_who_and_how_much() -> None:
    with pytest.raises(ResourceExhausted, match=r"actor/\w+ fits nowhere.* needs [\d,]+ bytes"):
        search(question(cluster(1, 2, 1.0)))


def test_a_pin_that_cannot_be_kept_is_refused() -> None:
    asked, name = question(cluster(1, 4, 16.0)), ModelStage.parse("actor/generation")
    wide = cluster(2, 4, 16.0).devices
    pin = replace(asked.knobs[name][0], layout=Layout(), replicas=8, devices=wide)
    with pytest.raises(ResourceExhausted, match=r"actor/generation fits nowhere.* pinned to"):
        search(replace(asked, pinned={name: pin}))
