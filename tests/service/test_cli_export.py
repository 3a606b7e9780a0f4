"""`nereus job export` finds the checkpoint by job, by folder and by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nereus import JobSpec
from nereus.v1 import jobs_pb2 as pb
from tests.service.scripted_controller import scripted_controller
from tests.service.test_cli import run
from tests.unit.checkpoints.checkpoint_cases import save


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return str(folder)


async def test_a_folder_is_exported_at_its_newest_or_at_the_step_asked_for(source: str, tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path / "root", step, source=source)
    newest = await run("job", "export", str(tmp_path / "root"), str(tmp_path / "a"), "--json")
    told = json.loads(newest.out)
    assert (told["folder"], told["step"], told["dtype"]) == (str(tmp_path / "a"), 4, "bfloat16")
    assert 0 < told["bytes"] < (tmp_path / "a" / "model.safetensors").stat().st_size
    older = await run("job", "export", str(tmp_path / "root"), str(tmp_path / "b"), "--step", "2", "--dtype", "float32")
    assert "actor after 2 steps, float32" in older.out
    one = await run("job", "export", str(tmp_path / "root" / "step-00000002"), str(tmp_path / "c"))
    assert "actor after 2 steps, bfloat16" in one.out
    missing = await run("job", "export", str(tmp_path / "root"), str(tmp_path / "d"), "--step", "3")
    assert missing.code == 2 and "those of steps 2, 4" in missing.err


@pytest.mark.parametrize("chosen", [True, False])
async def test_a_job_is_exported_from_where_its_spec_puts_checkpoints(
    chosen: bool, source: str, tmp_path: Path
) -> None:
    folder = tmp_path / "shared" if chosen else None
    spec = JobSpec.from_dict(
        {
            "model": source,
            "prompts": {"task": "gcd"},
            "rewards": ["exact_answer"],
            "checkpoint": {"every": 1, "folder": folder},
        }
    )
    root = tmp_path / "shared" / "mine" if chosen else tmp_path / "jobs" / "mine" / "checkpoints"
    save(root, 7, source=source)
    async with scripted_controller() as (controller, target):
        controller.jobs["mine"] = pb.Job(
            job_id="mine",
            state=pb.JOB_STATE_SUCCEEDED,
            spec_json=spec.to_json(),
            folder=str(tmp_path / "jobs" / "mine"),
        )
        done = await run("job", "export", "mine", str(tmp_path / "out"), "--target", target)
        assert "actor after 7 steps" in done.out, done.err
        unknown = await run("job", "export", "yours", str(tmp_path / "out2"), "--target", target)
        assert unknown.code == 2 and "no job yours" in unknown.err
