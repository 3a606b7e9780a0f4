"""Every algorithm on the live system, with tiny models in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.events import StepReport
from nereus.spec_file import load_spec
from nereus.sync import SyncClient
from nereus_common.rl.step_rollouts import StepRollouts, rollouts_file
from tests.system.job_specs import LIMITS, job_spec
from tests.tiny_models import save_tiny_reward_model

pytestmark = pytest.mark.timeout(420)

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = {"groups_per_step": 4, "samples_per_group": 4}


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "judge")


def run(client: SyncClient, spec: dict[str, Any]) -> tuple[list[dict[str, Any]], Path]:
    """The payloads of the job's steps, and its folder."""
    job = client.submit(spec)
    steps = [dict(event.payload) for event in job.watch() if isinstance(event.value, StepReport)]
    return steps, Path(job.get().check().folder)


def test_ppo_trains_actor_and_critic_with_a_reward_model_and_a_penalty_in_the_reward(
    client: SyncClient, tiny_model: Path, judge: Path
) -> None:
    others = {f"{stage}": "tp1.pp1.fs1" for stage in ("critic/training", "critic/inference", "judge/inference")}
    spec = job_spec("ppo", tiny_model, reference="tp1.pp1.fs1", others=others, engine="transformers", steps=4)
    spec["models"] |= {"critic": str(tiny_model), "judge": str(judge)}
    spec["algorithm"] = {"name": "ppo", **BATCH, "minibatches": 2, "epochs": 2, "kl": {"beta": 0.01}}
    spec["rewards"] = [*spec["rewards"], {"model": "judge", "weight": 0.1}]
    steps, _ = run(client, spec)
    assert len(steps) == 4
    for step in steps:
        assert step["logprob_gap_mean"] <= 1e-4
        assert step["sync"]["bytes_moved"] == step["sync"]["bytes_needed"] > 0
        assert step["critic_sync"]["bytes_moved"] == step["critic_sync"]["bytes_needed"] > 0
        assert set(step["rewards"]) == {"digit_share", "judge"}
        assert step["staleness_max"] == 0
        assert np.isfinite(
            [step["kl"], step["explained_variance"], step["critic_loss"], step["critic_grad_norm"]]
        ).all()
    first, last = steps[0], steps[-1]
    assert first["kl"] == pytest.approx(0, abs=1e-3) and first["critic_value"] == pytest.approx(0, abs=0.2)
    assert last["critic_value"] != pytest.approx(first["critic_value"], rel=0.01), "the critic that infers is trained"


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "remax", "groups_per_step": 8, "samples_per_group": 1},
        {"name": "rloo", **BATCH, "minibatches": 2},
        {"name": "reinforce++", "groups_per_step": 8, "samples_per_group": 2, "group_mean": True},
        {"name": "grpo", **BATCH, "ratio": "sequence", "aggregation": "sequence", "equal_groups": "replace"},
        {
            "name": "grpo",
            **BATCH,
            "aggregation": "constant",
            "normalise_std": False,
            "equal_groups": "drop",
            "epochs": 2,
        },
    ],
    ids=lambda algorithm: str(algorithm["name"]) + "-" + str(algorithm.get("equal_groups", "")),
)
def test_an_algorithm_runs_and_reports(client: SyncClient, tiny_model: Path, algorithm: dict[str, Any]) -> None:
    name = f"alg-{algorithm['name'].replace('+', 'p')}-{algorithm.get('equal_groups', 'x')}"
    steps, folder = run(client, job_spec(name, tiny_model, engine="transformers", steps=3, algorithm=algorithm))
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(np.isfinite(step["loss"]) and step["logprob_gap_mean"] <= 1e-4 for step in steps)
    samples = [json.loads(line) for line in (folder / "samples" / "step-00000002.jsonl").read_text().splitlines()]
    assert samples and all(sample["versions"] == [2, 2] for sample in samples)


def test_a_dialogue_is_trained_on_the_tokens_that_the_model_sampled(client: SyncClient, tiny_model: Path) -> None:
    """One response of this model in six ends by itself, which is when the environment answers; of 48 some do."""
    spec = job_spec("dialogue", tiny_model, engine="transformers", steps=3, rollouts={"record": True, "samples": 4})
    name = f"{Path(__file__).parent / 'environments.py'}:two_digits"
    spec |= {"environment": {"name": name, "max_turns": 3, "max_tokens": 160}, "rewards": []}
    spec["sampling"] = {"max_tokens": 64}
    spec["plan"]["stages"]["actor/generation"]["generation"] = {**LIMITS, "max_length": 320}
    steps, folder = run(client, spec)
    assert all(step["logprob_gap_mean"] <= 1e-4 and 0 <= step["reward_mean"] <= 1 for step in steps)
    batches = [StepRollouts.load(rollouts_file(folder / "rollouts", step)).batch for step in range(3)]
    for step, batch in enumerate(batches):
        assert (batch.versions[batch.mask] == step).all() and (batch.versions[~batch.mask] == -1).all()
        answered = (~batch.mask).any()
        assert answered or steps[step]["reward_mean"] == 0
    assert any((~batch.mask).any() for batch in batches), "some episode had a second turn"
    assert any(step["reward_mean"] > 0 for step in steps)
    samples = [json.loads(line) for line in (folder / "samples" / "step-00000002.jsonl").read_text().splitlines()]
    assert {sample["turns"] for sample in samples} <= {1, 2}


def test_recorded_rollouts_replayed_under_another_plan_have_the_same_losses(
    client: SyncClient, tiny_model: Path
) -> None:
    options = {"engine": "transformers", "steps": 3, "evaluation": {"size": 0}}
    recorded, folder = run(client, job_spec("record", tiny_model, rollouts={"record": True}, **options))
    replay = {"rollouts": {"replay": str(folder / "rollouts")}}
    again, _ = run(client, job_spec("replay", tiny_model, training="tp2.pp2.fs1", **replay, **options))
    for first, second in zip(recorded, again, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4, abs=1e-6)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
        assert second["reward_mean"] == first["reward_mean"]


def test_the_order_of_prompts_is_the_same_under_every_plan(client: SyncClient, tiny_model: Path) -> None:
    options = {"engine": "transformers", "steps": 2, "evaluation": {"size": 0}, "rollouts": {"record": True}}
    plans = [("order-a", "tp1.pp1.fs1", "tp1.pp1.fs1"), ("order-b", "tp1.pp1.fs1 x2", "tp1.pp1.fs2")]
    prompts = []
    for name, generation, training in plans:
        _, folder = run(client, job_spec(name, tiny_model, generation=generation, training=training, **options))
        batches = [StepRollouts.load(rollouts_file(folder / "rollouts", step)).batch for step in range(2)]
        prompts.append([(batch.position.tolist(), batch.prompt_tokens.tolist()) for batch in batches])
    assert prompts[0] == prompts[1]
    assert [position for positions, _ in prompts[0] for position in positions] == list(range(8))


def tiny_example(file: str, model: Path, judge: Path, **overrides: Any) -> dict[str, Any]:
    """A shipped job file with tiny models, a few small steps and nothing else changed."""
    spec = load_spec(EXAMPLES / file)
    data = json.loads(spec.to_json())
    for name, entry in data["models"].items():
        entry["path"] = str(judge if name == "judge" else model)
    data |= {"steps": 4, "evaluation": {"size": 8}, "max_logprob_gap": None, **overrides}
    data["algorithm"] |= {"groups_per_step": 8}
    return data


@pytest.mark.long
@pytest.mark.parametrize("file", ["ppo.yaml", "remax.yaml"])
def test_an_example_runs(client: SyncClient, tiny_model: Path, judge: Path, file: str) -> None:
    steps, _ = run(client, tiny_example(file, tiny_model, judge))
    assert len(steps) == 4


def test_the_asynchronous_example_overlaps_and_never_exceeds_its_staleness(
    client: SyncClient, tiny_model: Path, judge: Path
) -> None:
    spec = tiny_example("grpo-async.yaml", tiny_model, judge, steps=8)
    spec["sampling"]["max_tokens"] = 48
    steps, folder = run(client, spec)
    assert len(steps) == 8
    assert max(step["staleness_max"] for step in steps) == 1
    spans = [
        json.loads(line)["versions"]
        for file in sorted((folder / "samples").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert all(oldest <= newest <= oldest + 1 for oldest, newest in spans)
