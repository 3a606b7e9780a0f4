"""A job that changes its plan while it runs keeps every bit of its state, its prompts and its losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nereus.events import JobEvent, StepReport
from nereus.spec import JobSpec
from nereus.sync import SyncClient, SyncJobHandle
from nereus.transition import Transition
from nereus_common.core.errors import Conflict, ResourceExhausted
from tests.system.job_specs import job_spec
from tests.system.test_resume import follow

pytestmark = pytest.mark.timeout(600)
GRPO = {"name": "grpo", "groups_per_step": 4, "samples_per_group": 4}
PPO = {"name": "ppo", "groups_per_step": 4, "samples_per_group": 4, "minibatches": 2, "kl": {"beta": 0.05}}


def stage(layout: str, *slots: int) -> dict[str, Any]:
    return {"layout": layout, "devices": [f"node0/cpu{slot}" for slot in slots]}


def moves(*steps: int) -> list[dict[str, Any]]:
    layouts = [
        stage("tp1.pp2.fs1", 1, 2),
        stage("tp2.pp1.fs1", 2, 3),
        stage("tp1.pp1.fs1 x3", 1, 2, 3),
        stage("tp1.pp1.fs2", 3, 1),
    ]
    return [
        {"after_step": step, "plan": {"stages": {"actor/training": layout}}}
        for step, layout in zip(steps, layouts, strict=False)
    ]


def spec_of(name: str, model: Path, algorithm: dict[str, Any], steps: int, **more: Any) -> dict[str, Any]:
    ppo = algorithm["name"] == "ppo"
    places = {"critic/training": 4, "critic/inference": 5, "reference/inference": 5} if ppo else {}
    others = dict.fromkeys(places, "tp1.pp1.fs1")
    spec = job_spec(name, model, others=others, engine="transformers", steps=steps, evaluation={"size": 0}, **more)
    spec["algorithm"] = algorithm
    for name_of, place in places.items():
        spec["models"].setdefault(name_of.partition("/")[0], str(model))
        spec["plan"]["stages"][name_of]["devices"] = [f"node0/cpu{place}"]
    if ppo:
        spec["plan"]["colocated"] = [["critic/inference", "reference/inference"]]
    return spec


def steps_of(events: list[JobEvent]) -> list[dict[str, Any]]:
    return [dict(event.payload) for event in events if isinstance(event.value, StepReport)]


def states_of(events: list[JobEvent]) -> list[tuple[str, str]]:
    """(transition, state) as told, in order."""
    told = [event.payload for event in events if event.kind == "transition"]
    return [(payload["transition_id"].rpartition(".")[2], payload["state"]) for payload in told]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("algorithm", "steps", "after"),
    [
        pytest.param(GRPO, 4, (1, 3), id="grpo-twice"),
        pytest.param(GRPO, 12, (2, 4, 7, 9), id="grpo-four-times", marks=LONG),
        pytest.param(PPO, 12, (2, 4, 7, 9), id="ppo-four-times", marks=LONG),
    ],
)
def test_with_replayed_rollouts_a_job_that_moves_has_the_losses_of_one_that_stays(
    client: SyncClient, tiny_model: Path, algorithm: dict[str, Any], steps: int, after: tuple[int, ...]
) -> None:
    name = f"{algorithm['name']}-{steps}"
    stays = client.submit(spec_of(f"stays-{name}", tiny_model, algorithm, steps=steps, rollouts={"record": True}))
    kept = steps_of(list(stays.watch()))
    replay = {"replay": str(Path(stays.get().check().folder) / "rollouts")}
    moving = spec_of(f"moves-{name}", tiny_model, algorithm, steps=steps, rollouts=replay, moves=moves(*after))
    job = client.submit(moving)
    events = list(job.watch())
    job.get().check()
    moved = steps_of(events)
    assert [state for _, state in states_of(events)].count("done") == len(after), states_of(events)
    assert len(kept) == len(moved) == steps
    numbers = ("loss", "grad_norm", *(("critic_loss",) if algorithm is PPO else ()))
    for one, other in zip(kept, moved, strict=True):
        assert other["reward_mean"] == one["reward_mean"]
        for number in numbers:
            # a policy loss is a mean of terms of both signs and of size 1, and as exact as they are, however small
            assert other[number] == pytest.approx(one[number], rel=1e-4, abs=1e-6), (one["step"], number)


def test_a_move_at_a_users_wish_keeps_digests_prompts_and_units_that_need_not_change(
    client: SyncClient, tiny_model: Path
) -> None:
    """Two moves of a live job: training is cut otherwise, then generation gets a second unit on the device that was
    set free. A dry run says so first and changes nothing."""
    spec = JobSpec.from_dict(spec_of("wish", tiny_model, GRPO, steps=400, rollouts={"samples": 0}))
    target = {"stages": {"actor/training": stage("tp1.pp1.fs2", 2, 3)}}
    foreseen = client.show_transition(spec, target)
    job = client.submit(spec)
    follow(job, lambda event: isinstance(event.value, StepReport))
    shown = job.show_transition(target)
    assert (foreseen.plan, foreseen.nodes, foreseen.links) == (shown.plan, shown.nodes, shown.links)
    assert {link.target for link in shown.links} == {"node0/cpu2", "node0/cpu3"} and shown.seconds["move"] > 0
    assert shown.id == "" and {node.primitive for node in shown.nodes} == {"merge", "destroy"}
    assert all(shown.peaks[device] <= shown.budgets[device] for device in shown.peaks)
    moved = last(job, target)
    assert moved.bytes_moved == moved.bytes_needed == shown.bytes_needed > 0
    assert job.get().plan == moved.target
    generation = {"stages": {"actor/generation": stage("tp1.pp1.fs1 x2", 0, 1)}}
    units = units_of(client)
    extended = last(job, generation)
    assert {node.primitive for node in extended.nodes} == {"extend"}
    assert units_of(client) - units and units <= units_of(client), "what need not change stays"
    before = job.state_digest("actor/training")
    assert set(before.digests) == {"parameters", "exp_avg", "exp_avg_sq", "step"}
    with pytest.raises(Conflict, match="runs under that plan already"):
        job.apply_transition(generation)
    with pytest.raises(ResourceExhausted, match="node0/cpu9"):
        job.show_transition({"stages": {"actor/training": stage("tp1.pp1.fs1", 9)}})
    assert [one.state for one in job.transitions()] == ["done", "done"]
    folder = Path(job.get().folder)
    job.cancel()
    assert units_of(client) == set()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["transition.bytes_moved"] for line in lines if line.get("transition.done")] == [moved.bytes_moved, 0]


def last(job: SyncJobHandle, target: dict[str, Any]) -> Transition:
    """The transition to `target`, done."""
    begun = job.apply_transition(target)
    *_, ended = job.follow_transition(begun.id)
    return ended.check()


def units_of(client: SyncClient) -> set[str]:
    return {unit for device in client.cluster_status().devices for unit in device.units}
