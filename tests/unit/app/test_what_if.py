"""`nereus plan` and cluster files: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nereus.cli import build
from nereus.cluster_file import load_cluster
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import ModelStage
from nereus_common.core.plan import plan_from_dict
from nereus_common.planning.hardware import NODES, cluster_of

pytestmark = pytest.mark.fast

CLUSTERS = sorted((Path(__file__).parents[3] / "examples/clusters").iterdir())
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
JOB = """
model: {model}
algorithm: {{name: grpo, groups_per_step: 16, samples_per_group: 4, kl: {{beta: 0.01}}}}
sampling: {{max_tokens: 512}}
prompts: {{task: gcd}}
rewards: [exact_answer]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(model=tmp_path))
    return path


def nereus(*words: object) -> Any:
    return CliRunner().invoke(build(), ["plan", *map(str, words)])


def plans(*words: object) -> Any:
    return json.loads(nereus(*words, "--json").stdout)["plans"]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_every_cluster_file_that_ships_can_be_planned_for(job: Path, path: Path) -> None:
    found = plans(job, "--cluster", path)
    assert found and all(plan_from_dict(one["plan"]).devices for one in found)


def test_usual_servers_are_known_by_short_names() -> None:
    for name, kind in NODES.items():
        assert load_cluster(f"{name}x3") == cluster_of(name, 3)
        assert len(load_cluster(f"{name}x3").devices) == 3 * kind.devices


def test_text_fits_eighty_columns(job: Path) -> None:
    said = nereus(job, "--cluster", "h100x2")
    assert said.exit_code == 0
    assert max(map(len, said.stdout.splitlines())) <= 80, said.stdout


def test_the_plans_shown_are_as_many_as_asked_for_and_ordered(job: Path) -> None:
    seconds = [one["step_seconds"] for one in plans(job, "--cluster", "h100x1", "--top", 4)]
    assert seconds == sorted(seconds)
    assert 1 < len(seconds) <= 4


def test_fewer_devices_make_no_faster_plan(job: Path) -> None:
    best = [plans(job, "--cluster", "h100x2", "--gpus", count)[0] for count in (2, 5, 8, 16)]
    seconds = [one["step_seconds"] for one in best]
    assert seconds == sorted(seconds, reverse=True)
    assert all(
        len(plan_from_dict(one["plan"]).devices) <= count for one, count in zip(best, (2, 5, 8, 16), strict=True)
    )


def test_longer_sequences_take_longer(job: Path) -> None:
    short, long = (plans(job, "--cluster", "h100x1", "--seq-len", length)[0] for length in (1024, 8192))
    assert 4 * short["step_seconds"] < long["step_seconds"]


def test_limits_of_the_jobs_own_plan_hold(job: Path) -> None:
    device = "devices: [node0/gpu0]"
    limits = "generation: {max_sequences: 7, kv_bytes: 1234567890}"
    stages = {"actor/generation": f"{{layout: tp1.pp1.fs1, {device}, {limits}}}"}
    stages |= dict.fromkeys(("actor/training", "reference/inference"), f"{{layout: tp1.pp1.fs1, {device}}}")
    written = "\n".join(f"    {name}: {value}" for name, value in stages.items())
    shared = "  colocated: [[actor/generation, reference/inference, actor/training]]"
    job.write_text(f"{job.read_text()}plan:\n  stages:\n{written}\n{shared}\n")
    limits_found = plan_from_dict(plans(job, "--cluster", "h100x1")[0]["plan"])[
        ModelStage.parse("actor/generation")
    ].generation
    assert limits_found is not None
    assert (limits_found.max_sequences, limits_found.kv_bytes) == (7, 1234567890)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "h900x2"], "h900"),
        (["--cluster", "h100x0"], "0 nodes"),
        (["--cluster", "h100x1", "--gpus", "9"], "gpus is 9"),
        (["--cluster", "h100x1", "--gpus", "0"], "gpus is 0"),
        (["--cluster", "h100x1", "--seq-len", "-5"], "seq-len|-5"),
        (["--cluster", "h100x1", "--seq-len", "100"], "256"),
        (["--cluster", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_is_refused_by_name(job: Path, words: list[str], named: str) -> None:
    said = nereus(job, *words)
    assert said.exit_code != 0
    assert any(part in said.stderr for part in named.split("|"))
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("nodes: []", "nodes"),
        ("nodes: [{kind: h100, count: -1}]", "nodes.0.count"),
        ("nodes: [{kind: h100, cuont: 1}]", "did you mean count"),
        ("nodes: [{kind: unheard}]", "nodes.0.kind"),
        ("nodes: [{kind: a}]\nkinds: {a: {devices: 1}}", "kinds.a.memory_gb is missing"),
        (
            "nodes: [{kind: a}]\nkinds: {a: {devices: 1, memory_gb: .nan, tflops: {bfloat16: 1}, memory_gb_per_s: 1, "
            "inside_gb_per_s: 1, outside_gb_per_s: 1}}",
            "kinds.a.memory_gb",
        ),
    ],
)
def test_a_wrong_cluster_file_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=field.replace(".", r"\.")):
        load_cluster(str(path))


def test_a_job_that_fits_nowhere_is_told_who_needs_how_much(job: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 400, "hidden_size": 8192}))
    said = nereus(job, "--cluster", "v100-16x2")
    assert said.exit_code == 1
    assert "actor/" in said.stderr and "bytes" in said.stderr
