"""What a job's autopilot asks for, and that it never harms the job: a real registry in memory, and a made-up job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nereus_controller.autopilot import LEDGER, Autopilot, Hands
from nereus_controller.step import StepData
from nereus_controller.synced import Synced

from nereus.spec import JobSpec
from nereus.v1 import transitions_pb2 as pb
from nereus_common.core.errors import NereusError, ResourceExhausted, Unavailable
from nereus_common.core.ids import DeviceId, JobId
from nereus_common.core.plan import Plan
from nereus_common.observe.stopwatch import Stopwatch
from nereus_common.planning.pilot import SETTLING
from nereus_common.registry import Device
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.rl.assembly import Completion, Group
from nereus_common.rl.step_rollouts import ScoredGroup, StepRollouts
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

JOB = JobId("job")
STEPS = 12
MODEL = ModelShape("llama", 4, 64, 128, 4, 4, 16, 512, tied=True)
DEVICES = [f"node0/cpu{number}" for number in range(5)]
LIMITS = {"max_sequences": 8, "kv_bytes": 1 << 20}
SPEC: dict[str, Any] = {
    "model": {"path": "/m", "engines": {"generation": {"name": "transformers"}}},
    "prompts": {"task": "gcd"},
    "rewards": ["exact_answer"],
    "steps": 1000,
    "algorithm": {"groups_per_step": 4, "samples_per_group": 2},
    "plan": {
        "stages": {
            "actor/generation": {"layout": "tp1.pp1.fs1", "devices": DEVICES[:1], "generation": LIMITS},
            "actor/training": {"layout": "tp1.pp4.fs1", "devices": DEVICES[1:]},
        }
    },
}


@dataclass
class Site:
    """`refusal`: of a dry run. `undone`: how every move ends, "" while it has not."""

    registry: MemoryRegistry
    folder: Path
    refusal: NereusError | None = None
    undone: str = ""
    asked: list[Plan] = field(default_factory=list)
    told: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    async def emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        json.dumps(payload)
        self.told.append((kind, payload))

    async def show(self, target: Plan) -> pb.Transition:
        if self.refusal is not None:
            raise self.refusal
        return pb.Transition(bytes_needed=1000, seconds={"move": 0.01, "prepare": 100.0})

    async def apply(self, target: Plan) -> str:
        self.asked.append(target)
        return f"job.t{len(self.asked)}"

    async def ended(self, transition: str) -> tuple[bool, str]:
        return bool(self.undone), self.undone

    def pilot(self, mode: str, **more: Any) -> Autopilot:
        spec = JobSpec.from_dict({**SPEC, "adapt": {"mode": mode, "gamma": 1.0, **more}})
        clock = iter(range(1, 10_000))
        shapes = dict.fromkeys(spec.model_stages, MODEL)
        hands = Hands(self.show, self.apply, self.ended)
        plan = spec.written_plan
        return Autopilot(
            JOB, spec, plan, shapes, self.registry, hands, self.emit, self.folder, lambda: 0.1 * next(clock)
        )

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [payload for name, payload in self.told if name == kind]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with MemoryRegistry() as registry:
        for name in DEVICES:
            await registry.put_device(Device(DeviceId.parse(name), "cpu", 8 << 30))
        yield Site(registry, tmp_path)


def step(number: int, seconds: float = 1.0, tokens: int = 4) -> StepData:
    completion = Completion((1,) * tokens, (0.0,) * tokens, (number,) * tokens, True)
    groups = [ScoredGroup(Group(place, (5, 6, 7), (completion, completion)), {"r": (0.0, 1.0)}) for place in range(4)]
    watch = Stopwatch({"total": 2 * seconds, "sync": 0.1})
    data = StepData.of(number, StepRollouts.of(groups, 4 * number), watch)
    data.task_seconds["update actor"] = seconds
    return data


SYNCED = {"actor": Synced("actor", 10, 10, 0.1, {})}


async def flown(pilot: Autopilot, steps: int, first: int = 0, tokens: int = 4) -> None:
    for number in range(first, first + steps):
        await pilot.after_step(step(number, tokens=tokens), SYNCED, changed=False)
        for _ in range(50):
            await asyncio.sleep(0.01)
            if all(not task.get_name().endswith("replan") for task in asyncio.all_tasks()):
                break


async def test_a_clumsy_plan_is_left_once_it_has_settled_and_the_decision_says_why(site: Site) -> None:
    pilot = site.pilot("auto")
    await flown(pilot, SETTLING)
    assert not site.told
    await flown(pilot, 1, SETTLING)
    (decision,) = site.of_kind("decision")
    assert [plan.id for plan in site.asked] == [decision["taken"]]
    assert decision["transition_id"] == "job.t1"
    taken, *others = decision["targets"]
    assert taken["verdict"] == "taken" and taken["saving"] > 0
    assert taken["payback"] <= decision["gamma"] * decision["horizon"]
    assert {other["verdict"] for other in others} <= {"not needed"}
    assert taken["transition_seconds"] < 100, "the job steps on while a move is prepared"


async def test_a_dry_run_decides_and_asks_for_nothing(site: Site) -> None:
    await flown(site.pilot("dry-run"), SETTLING + 2)
    decisions = site.of_kind("decision")
    assert decisions[0]["taken"] and not site.asked
    assert not any(decision["transition_id"] for decision in decisions)


async def test_nothing_is_asked_for_while_a_move_is_under_way_and_none_twice_that_failed(site: Site) -> None:
    pilot = site.pilot("auto")
    await flown(pilot, SETTLING + 6)
    assert len(site.asked) == 1
    site.undone = "the engine said no"
    for number in range(3):
        await flown(pilot, 4, SETTLING + 6 + 4 * number, tokens=8 << number)
    assert len({plan.id for plan in site.asked}) == len(site.asked)
    later = [target for decision in site.of_kind("decision")[1:] for target in decision["targets"]]
    assert any(target["why"] == "the engine said no" for target in later if target["plan_id"] == site.asked[0].id)


async def test_a_target_that_cannot_be_reached_is_told_with_its_reason(site: Site) -> None:
    site.refusal = ResourceExhausted("node0/cpu1 lacks 7 bytes")
    await flown(site.pilot("auto"), SETTLING + 1)
    (decision,) = site.of_kind("decision")
    assert {target["verdict"] for target in decision["targets"]} == {"unreachable"}
    assert all("7 bytes" in target["why"] for target in decision["targets"])
    assert not site.asked


async def test_what_fails_in_it_is_told_and_the_job_goes_on(site: Site) -> None:
    async def devices() -> tuple[Device, ...]:
        raise Unavailable("the registry is away")

    site.registry.devices = devices  # type: ignore[method-assign]
    await flown(site.pilot("auto"), SETTLING + 2)
    assert not site.asked
    assert all("the registry is away" in payload["message"] for payload in site.of_kind("log"))
    assert len(site.of_kind("log")) == SETTLING + 2


async def test_every_step_is_in_the_ledger_as_predicted_and_as_measured(site: Site) -> None:
    await flown(site.pilot("dry-run"), STEPS)
    lines = [json.loads(line) for line in (site.folder / LEDGER).read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert all(line["measured"]["update actor"] == 1.0 for line in steps)
    errors = [abs(line["predicted"]["update actor"] - 1.0) for line in steps]
    assert errors[-1] < 0.1 < errors[0]


async def test_a_step_without_samples_teaches_nothing(site: Site) -> None:
    pilot = site.pilot("auto")
    nothing = StepData.of(0, StepRollouts.of([], 0), Stopwatch())
    await pilot.after_step(nothing, {}, changed=False)
    assert not (site.folder / LEDGER).exists()
