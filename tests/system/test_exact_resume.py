"""A run that was cut and went on is the run that was not cut: same rollouts in, same losses and same state out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import down
from nereus.cluster.state import ClusterFolder
from nereus.cluster.up import up
from nereus.events import JobEvent, Restart, StepReport
from nereus.sync import SyncClient, SyncJobHandle
from nereus_common.checkpoints.folder import complete
from nereus_common.checkpoints.manifest import Manifest, read_manifest
from tests.system.job_specs import job_spec
from tests.system.test_resume import follow, kill, restarts_of, saved

pytestmark = pytest.mark.timeout(420)
STEPS = 8
GRPO = {"name": "grpo", "groups_per_step": 4, "samples_per_group": 4}
PPO = {"name": "ppo", "groups_per_step": 4, "samples_per_group": 4, "minibatches": 2, "epochs": 2, "kl": {"beta": 0.05}}


def spec_of(name: str, model: Path, algorithm: dict[str, Any], rollouts: dict[str, Any], **more: Any) -> dict[str, Any]:
    ppo = algorithm["name"] == "ppo"
    critic = {"critic/training": "tp1.pp1.fs1", "critic/inference": "tp1.pp1.fs1"}
    spec = job_spec(
        name,
        model,
        reference="tp1.pp1.fs1" if ppo else None,
        others=critic if ppo else None,
        engine="transformers",
        steps=STEPS,
        evaluation={"size": 0},
        checkpoint={"every": 2, "keep": 9, "resume": "auto"},
        rollouts=rollouts,
        **more,
    )
    spec["algorithm"] = algorithm
    if ppo:
        spec["models"]["critic"] = str(model)
    return spec


def manifests(job: SyncJobHandle) -> dict[int, Manifest]:
    return {step: read_manifest(path) for step, path in complete(Path(job.get().folder) / "checkpoints").items()}


def told(events: list[JobEvent]) -> dict[int, dict[str, Any]]:
    """What each step told last: one that a restart repeats counts as it was repeated."""
    return {event.value.step: dict(event.payload) for event in events if isinstance(event.value, StepReport)}


def numbers(step: dict[str, Any]) -> dict[str, float]:
    """What a step's arithmetic gave; times and sizes differ from run to run."""
    names = (
        "loss",
        "grad_norm",
        "reward_mean",
        "approx_kl",
        "kl",
        "critic_loss",
        "critic_grad_norm",
        "explained_variance",
    )
    return {name: step[name] for name in names if name in step}


@pytest.mark.parametrize("algorithm", [pytest.param(GRPO, marks=pytest.mark.long), PPO], ids=["grpo", "ppo"])
def test_a_job_whose_controller_is_killed_ends_with_the_bits_of_one_that_ran_through(
    tmp_path: Path, tiny_model: Path, algorithm: dict[str, Any]
) -> None:
    folder, config = ClusterFolder(tmp_path / "data"), ClusterConfig(devices={f"cpu{n}": 5 << 30 for n in range(6)})
    state = up(folder, config)
    try:
        with SyncClient.connect(state.controller) as client:
            whole = client.submit(spec_of("whole", tiny_model, algorithm, {"record": True}))
            uncut = told(list(whole.watch()))
            through = manifests(whole)
            replay = {"replay": str(Path(whole.get().check().folder) / "rollouts")}
            cut = client.submit(spec_of("cut", tiny_model, algorithm, replay))
            follow(cut, saved(2))
        kill(state, "controller")
        with SyncClient.connect(up(folder, config).controller) as client:
            cut = client.job(cut.id)
            events = list(cut.watch())
            cut.get().check()
            (restart,) = restarts_of(events)
            assert isinstance(restart, Restart) and 2 <= restart.from_step < STEPS
            assert {step: numbers(one) for step, one in told(events).items()} == {
                step: numbers(one) for step, one in uncut.items()
            }
            resumed = manifests(cut)
            assert {s: (m.position, dict(m.models)) for s, m in resumed.items()} == {
                s: (m.position, dict(m.models)) for s, m in through.items()
            }
            assert set(resumed) == {2, 4, 6, 8}
    finally:
        down(folder)


@pytest.mark.long
def test_a_job_that_goes_on_under_another_plan_has_the_losses_of_one_that_kept_its_plan(
    client: SyncClient, tiny_model: Path
) -> None:
    whole = client.submit(spec_of("kept", tiny_model, PPO, {"record": True}))
    uncut = told(list(whole.watch()))
    replay = {"replay": str(Path(whole.get().check().folder) / "rollouts")}
    moved = client.submit({**spec_of("moved", tiny_model, PPO, replay), "steps": 4})
    moved.wait()
    plan = spec_of("moved", tiny_model, PPO, replay)["plan"]
    for stage, layout in {"actor/training": "tp2.pp2.fs1", "critic/training": "tp1.pp1.fs2 x2"}.items():
        plan["stages"][stage] |= {"layout": layout, "devices": [f"node0/cpu{n}" for n in range(1, 5)]}
    plan["stages"]["reference/inference"]["devices"] = plan["stages"]["critic/inference"]["devices"] = ["node0/cpu5"]
    plan["colocated"] = [["actor/training", "critic/training"], ["reference/inference", "critic/inference"]]
    moved.resume(plan=plan, steps=STEPS)
    again = told(list(moved.watch()))
    moved.get().check()
    for step in range(STEPS):
        assert numbers(again[step]) == pytest.approx(numbers(uncut[step]), rel=1e-3 if step >= 4 else 0, abs=1e-5), step
    assert all(again[step]["loss"] == uncut[step]["loss"] for step in range(4))
