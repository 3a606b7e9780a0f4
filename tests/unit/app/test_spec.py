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
        ({"rewards": []}, "rewards", "at least 1 item"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature", "valid number"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "finite number"),
        ({"name": "two words"}, "name", "is not a name"),
        ({"models": {"actr": "x"}}, "models", "models lacks actor"),
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
