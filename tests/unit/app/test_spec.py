"""A job file is understood, or refused by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nereus.spec import JobSpec
from nereus.spec_file import load_spec
from nereus_common.core.errors import InvalidInput, NotFound

pytestmark = pytest.mark.fast

SMALLEST: dict[str, Any] = {"model": "/m", "prompts": {"task": "gcd"}, "rewards": ["exact_answer"]}
LIMITS = {"max_sequences": 4}
SHARED = {
    "stages": {
        "actor/generation": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu0"], "generation": LIMITS},
        "actor/training": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu0"]},
    },
    "colocated": [["actor/generation", "actor/training"]],
}
TRAINING_ONLY = {"stages": {"actor/training": {"layout": "tp1.pp1.fs1", "devices": ["node0/cpu0"]}}}


def test_a_job_needs_only_a_model_prompts_and_rewards() -> None:
    spec = JobSpec.from_dict(SMALLEST)
    assert spec.models["actor"].path == "/m"
    assert [str(stage) for stage in spec.model_stages] == ["actor/generation", "actor/training"]


def test_a_penalty_for_leaving_the_reference_needs_the_reference() -> None:
    spec = JobSpec.from_dict({**SMALLEST, "algorithm": {"kl": {"beta": 0.1}}})
    assert str(spec.model_stages[-1]) == "reference/inference"
    assert spec.model("reference").path == "/m"


def test_json_gives_the_same_job_back() -> None:
    spec = JobSpec.from_dict({**SMALLEST, "optimizer": {"learning_rate": 1e-5}, "steps": 7})
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"optimiser": {}}, "optimiser", "did you mean optimizer?"),
        ({"optimizer": {"lerning_rate": 1}}, "optimizer.lerning_rate", "did you mean learning_rate?"),
        ({"prompts": {"task": "gcd", "parms": 1}}, "prompts.parms", "did you mean params?"),
        ({"prompts": {"file": "a.jsonl", "anser": "x"}}, "prompts.anser", "did you mean answer?"),
        ({"prompts": {}}, "prompts.task", "is missing"),
        ({"rewards": [{"nam": "x", "name": "y"}]}, "rewards.0.nam", "did you mean name?"),
        ({"rewards": []}, "job", "rewards is empty"),
        ({"environment": {"name": "x", "option": {}}}, "environment.option", "did you mean options?"),
        ({"asynchronous": {"stalenes": 1}}, "asynchronous.stalenes", "did you mean staleness?"),
        ({"adapt": {"mode": "approve"}}, "adapt.mode", "'off', 'dry-run' or 'auto'"),
        ({"adapt": {"gamma": 1.5}}, "adapt.gamma", "less than or equal to 1"),
        ({"adapt": {"pin": ["actor/inference"]}}, "job", "adapt.pin names actor/inference, which this job lacks"),
        ({"transitions": {"in_fligth": "finish"}}, "transitions.in_fligth", "did you mean in_flight?"),
        ({"transitions": {"in_flight": "keep"}}, "transitions.in_flight", "'finish', 'resume' or 'requeue'"),
        (
            {"asynchronous": {"partial": False}, "transitions": {"in_flight": "resume"}},
            "transitions",
            "in_flight: resume lets responses go on",
        ),
        ({"rewards": [{"name": "a", "model": "b"}]}, "rewards.0", "a function (name) or a model (model)"),
        ({"rewards": ["a.py:f", "b.py:f"]}, "job", "two rewards are called f"),
        ({"rewards": [{"model": "judge"}]}, "job", "models lacks judge, which this job needs"),
        ({"rewards": [{"model": "actor"}]}, "job", "the model actor, which has another part to play"),
        ({"algorithm": "ppo"}, "job", "models lacks critic, which this job needs"),
        ({"algorithm": "pppo"}, "algorithm", "ppo"),
        ({"algorithm": {"name": "ppo", "normalise_std": False}}, "algorithm.normalise_std", "is unknown"),
        ({"algorithm": {"minibatches": 17}}, "algorithm", "17 minibatches cannot be cut from 16 groups"),
        (
            {"algorithm": {"overlong": {"length": 8, "buffer": 9}}},
            "algorithm.overlong",
            "longer than overlong.length 8",
        ),
        ({"sampling": {"top_p": 0.9}, "max_logprob_gap": 0.1}, "job", "leave top_p and top_k out"),
        ({"sampling": {"top_k": 5}, "algorithm": {"name": "rloo", "kl": {"beta": 0.1}}}, "job", "the reward is biased"),
        ({"asynchronous": {"staleness": 1}, "plan": SHARED}, "job", "shares devices with actor/training"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature", "valid number"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "finite number"),
        ({"name": "two words"}, "name", "is not a name"),
        ({"models": {"actr": "x"}}, "job", "models lacks actor"),
        ({"models": {"actor": "x", "extra": "y"}}, "job", "models names extra, which nothing uses"),
        ({"plan": {"stages": {"actor/training": {"layout": "tp0.pp1.fs1", "devices": []}}}}, "plan", "layout.tp is 0"),
        ({"plan": {"stagse": {}}}, "plan", "plan.stagse is unknown"),
        ({"plan": TRAINING_ONLY}, "job", "the plan has no actor/generation"),
    ],
)
def test_what_is_wrong_is_named_by_field(change: dict[str, Any], field: str, message: str) -> None:
    data = {**SMALLEST, **change}
    if "models" in change:
        del data["model"]
    with pytest.raises(InvalidInput) as refused:
        JobSpec.from_dict(data, origin="job.yaml")
    assert str(refused.value).startswith("job.yaml: ")
    assert message in str(refused.value)
    assert refused.value.details["field"] == field


def test_a_key_inside_a_models_engine_is_found() -> None:
    data = {**SMALLEST, "model": {"path": "/m", "engines": {"generation": {"nmae": "vllm"}}}}
    with pytest.raises(InvalidInput, match=r"models.actor.engines.generation.nmae is unknown \(did you mean name\?\)"):
        JobSpec.from_dict(data)


def test_every_wrong_field_is_listed() -> None:
    with pytest.raises(InvalidInput) as refused:
        JobSpec.from_dict({**SMALLEST, "steps": 0, "seeed": 1})
    assert len(str(refused.value).splitlines()) == 2


YAML = "model: models/tiny\nprompts: {file: rows.jsonl}\nrewards: [{name: 'mine.py:score', weight: 2}]\n"
TOML = 'model = "models/tiny"\n[prompts]\nfile = "rows.jsonl"\n[[rewards]]\nname = "mine.py:score"\nweight = 2\n'
JSON = json.dumps(
    {
        "model": "models/tiny",
        "prompts": {"file": "rows.jsonl"},
        "rewards": [{"name": "mine.py:score", "weight": 2}],
    }
)


@pytest.mark.parametrize(("name", "text"), [("job.yaml", YAML), ("job.toml", TOML), ("job.json", JSON)])
def test_relative_paths_are_relative_to_the_job_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    spec = load_spec(tmp_path / name, {"optimizer.learning_rate": "1e-5"})
    assert spec.models["actor"].path == str(tmp_path / "models/tiny")
    assert spec.prompts.model_dump()["file"] == tmp_path / "rows.jsonl"
    assert spec.rewards[0].name == f"{tmp_path}/mine.py:score"
    assert spec.optimizer.learning_rate == 1e-5


def test_a_packaged_model_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(YAML.replace("models/tiny", "demo:smollm2"))
    assert load_spec(tmp_path / "job.yaml").models["actor"].path == "demo:smollm2"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.yaml", "model: [", "job.yaml cannot be read"),
        ("job.toml", "model = ", "job.toml cannot be read"),
        ("job.yaml", "- 1", "job.yaml holds no job"),
        ("job.txt", "x", "'.txt' is no job file"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_spec(tmp_path / name)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        load_spec(tmp_path / "job.yaml")


def test_an_algorithm_alone_is_enough_where_its_options_are_the_usual_ones() -> None:
    spec = JobSpec.from_dict({**SMALLEST, "algorithm": "remax"})
    assert spec.algorithm.name == "remax" and spec.algorithm.needs_baseline


def test_ppo_has_a_critic_with_a_head_of_its_own_and_perhaps_its_own_optimizer() -> None:
    critic = {"path": "/c", "optimizer": {"learning_rate": 1e-5}}
    models = {"models": {"actor": "/m", "critic": critic, "judge": "/r"}}
    rest = {key: value for key, value in SMALLEST.items() if key not in ("model", "rewards")}
    rewards = [{"model": "judge", "weight": 0.5}, "exact_answer"]
    spec = JobSpec.from_dict({**rest, **models, "algorithm": {"name": "ppo", "kl": {"beta": 0.1}}, "rewards": rewards})
    assert [str(stage) for stage in spec.model_stages] == [
        "actor/generation",
        "actor/training",
        "critic/inference",
        "critic/training",
        "judge/inference",
        "reference/inference",
    ]
    assert [str(spec.head(model)) for model in ("actor", "reference", "critic", "judge")] == [
        "lm",
        "lm",
        "score",
        "score",
    ]
    assert spec.optimizer_of("critic").learning_rate == 1e-5
    assert spec.optimizer_of("actor") == spec.optimizer


def test_a_penalty_in_the_reward_is_told_to_the_estimator_and_not_to_the_loss() -> None:
    spec = JobSpec.from_dict({**SMALLEST, "algorithm": {"name": "rloo", "kl": {"beta": 0.1}}})
    assert spec.algorithm.loss_options()["kl_beta"] == 0
    assert spec.algorithm.estimator_options()["kl_beta"] == 0.1
