"""The command: JSON for scripts, exit codes that tell bad input from failure, one clear line for errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import yaml

from nereus.v1 import jobs_pb2 as pb
from tests.service.scripted_controller import PLAN, ScriptedController, scripted_controller

ROOT = Path(__file__).parents[2]
JOB = "model: /m\nprompts: {task: gcd}\nrewards: [exact_answer]\n"


class Outcome:
    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()


async def run(
    *arguments: str, env: Mapping[str, str] | None = None, program: tuple[str, ...] = ("-m", "nereus")
) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *program,
        *arguments,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(env or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Outcome(process.returncode, out, err)


@pytest.fixture
async def controller() -> AsyncIterator[tuple[ScriptedController, str]]:
    async with scripted_controller() as running:
        yield running


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(JOB)
    return str(tmp_path / "job.yaml")


async def test_a_job_is_submitted_followed_and_listed(
    controller: tuple[ScriptedController, str], job_file: str
) -> None:
    target = ("--target", controller[1])
    done = await run("job", "submit", job_file, "--id", "one", "--watch", "--set", "steps=2", *target)
    assert done.code == 0, done.err
    assert re.search(r"step 2 reward 0.500 gap 0.0000 50 tok/s 2.0 s", done.out)
    assert done.out.splitlines()[-1] == "succeeded"
    assert json.loads(controller[0].jobs["one"].spec_json)["steps"] == 2

    listed = await run("job", "list", "--json", *target)
    assert [job["id"] for job in json.loads(listed.out)] == ["one"]
    got = await run("job", "get", "one", "--json", *target)
    assert json.loads(got.out)["state"] == "succeeded"
    shown = await run("job", "get", "one", *target)
    assert "actor/generation tp1.pp1.fs1" in shown.out
    watched = await run("job", "watch", "one", "--json", "--after", "1", *target)
    assert [json.loads(line)["kind"] for line in watched.out.splitlines()] == ["step", "news", "state"]
    cancelled = await run("job", "cancel", "one", *target)
    assert cancelled.out == "one cancelled\n"


async def test_following_a_failed_job_shows_its_log_and_fails(
    controller: tuple[ScriptedController, str], job_file: str
) -> None:
    await run("job", "submit", job_file, "--id", "one", "--target", controller[1])
    controller[0].jobs["one"].MergeFrom(pb.Job(error_reason="PROCESS_LOST", error_log=["the last line"]))
    controller[0].failing = True
    done = await run("job", "watch", "one", "--target", controller[1])
    assert done.code == 1
    assert "the last line" in done.err


async def test_lines_are_whole_in_a_narrow_terminal(controller: tuple[ScriptedController, str], job_file: str) -> None:
    done = await run("job", "submit", job_file, "--watch", "--target", controller[1], env={"COLUMNS": "20"})
    assert done.code == 0
    assert "gap 0.0000 50 tok/s 2.0 s" in done.out


async def test_an_ended_job_is_resumed_under_another_plan_and_only_what_is_new_is_shown(
    controller: tuple[ScriptedController, str], job_file: str, tmp_path: Path
) -> None:
    scripted, target = controller
    await run("job", "submit", job_file, "--id", "one", "--target", target)
    refused = await run("job", "resume", "one", "--target", target)
    assert (refused.code, refused.err) == (1, "nereus: job one is still running (cancel it)\n")
    scripted.jobs["one"].state = pb.JOB_STATE_CANCELLED

    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"plan": json.loads(PLAN.to_json())}))
    done = await run("job", "resume", "one", "--plan", f"{tmp_path}/plan.yaml", "--steps", "9", "--target", target)
    assert (done.code, done.out) == (0, "one goes on after step 1\n"), done.err
    assert scripted.resumed == [(PLAN.to_json(), 9)]

    scripted.jobs["one"].state = pb.JOB_STATE_CANCELLED
    followed = await run("job", "resume", "one", "--watch", "--target", target)
    assert (followed.code, followed.out) == (0, "")  # the script has told all its events before
    assert scripted.watches[-1] == "4" and scripted.resumed[1:] == [("", 0)]
    shown = await run("job", "get", "one", "--target", target)
    assert "after step 1" in shown.out


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "plan file"), ("stages: {}\nstagse: {}\n", "stagse"), ("plan: 3\n", "plan holds no mapping")],
)
async def test_a_plan_file_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "plan.yaml").write_text(text)
    done = await run("job", "resume", "one", "--plan", str(tmp_path / "plan.yaml"), "--target", "127.0.0.1:1")
    assert done.code == 2
    assert message in done.err and "plan.yaml" in done.err and len(done.err.splitlines()) == 1


async def test_samples_are_readable_in_a_narrow_terminal(controller: tuple[ScriptedController, str]) -> None:
    narrow = {"COLUMNS": "60"}
    shown = await run("job", "samples", "one", "--target", controller[1], env=narrow)
    assert shown.code == 0, shown.err
    assert max(map(len, shown.out.splitlines())) <= 60
    assert "reward 1.000 · 25 tok · finished · prompt 70 · step 2" in shown.out.splitlines()
    assert "> The answer is [bold]7[/]." in shown.out.splitlines()
    assert "What is 0 + 4?" in shown.out and "cut off" in shown.out and "(nothing)" in shown.out
    assert shown.out.count("An example") < 3 * 15


async def test_samples_come_best_or_worst_first_and_as_json(controller: tuple[ScriptedController, str]) -> None:
    target = ("--target", controller[1])
    best = await run("job", "samples", "one", "--limit", "1", "--json", *target)
    assert [one["position"] for one in json.loads(best.out)] == [70]
    worst = await run("job", "samples", "one", "--step", "2", "--worst", "--limit", "2", "--json", *target)
    assert [one["position"] for one in json.loads(worst.out)] == [72, 71]
    none = await run("job", "samples", "one", "--step", "3", *target)
    assert (none.code, none.err) == (2, "nereus: job one has no recorded samples of step 2\n")


async def test_checkpoints_and_restarts_are_lines_of_a_watch(
    controller: tuple[ScriptedController, str], job_file: str
) -> None:
    controller[0].told = [
        ("checkpoint", '{"step": 4, "bytes": 12000000, "seconds": {"snapshot": 0.1, "write": 0.7}}'),
        ("restart", '{"attempt": 2, "from_step": 4, "reason": "PROCESS_LOST", "message": "worker [0] died"}'),
        ("restart", '{"attempt": 3, "from_step": 0, "reason": "RESUMED"}'),
    ]
    done = await run("job", "submit", job_file, "--watch", "--target", controller[1], env={"COLUMNS": "60"})
    assert done.out.splitlines()[-4:-1] == [
        "checkpoint after step 4 (12.0 MB in 0.8 s)",
        "attempt 2 goes on after step 4: worker [0] died",
        "attempt 3 goes on from the beginning",
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (JOB + "stesp: 3\n", (), "job.yaml: stesp is unknown (did you mean steps?)"),
        (JOB, ("--set", "steps"), "--set 'steps' is not FIELD=VALUE"),
        (JOB, ("--set", "steps=0"), "job.yaml: steps: Input should be greater than or equal to 1"),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_two(
    tmp_path: Path, text: str, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "job.yaml").write_text(text)
    done = await run("job", "submit", str(tmp_path / "job.yaml"), *arguments, "--target", "127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert message in done.err and len(done.err.splitlines()) == 1


async def test_an_unknown_job_is_exit_code_two(controller: tuple[ScriptedController, str]) -> None:
    done = await run("job", "get", "none", "--target", controller[1])
    assert (done.code, done.err) == (2, "nereus: there is no job none\n")


@pytest.mark.parametrize("command", [("status",), ("job", "list"), ("job", "watch", "x")])
async def test_without_a_cluster_the_command_says_what_to_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = await run(*command, "--data-dir", str(tmp_path))
    assert done.code in (1, 2)
    assert "nereus up" in done.err and len(done.err.splitlines()) == 1


async def test_a_controller_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    done = await run("job", "list", "--target", "127.0.0.1:1")
    assert done.code == 1
    assert "127.0.0.1:1 cannot be reached" in done.err and "nereus up" in done.err


async def test_status_shows_devices_and_grants(controller: tuple[ScriptedController, str]) -> None:
    done = await run("status", "--json", "--target", controller[1])
    assert json.loads(done.out)["cluster"]["devices"][0]["units"] == ["u"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("devices: {}\n", "at least one device"), ("devcies: {cpu0: 1GiB}\n", "did you mean devices?")],
)
async def test_a_bad_cluster_config_starts_nothing(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    done = await run("up", "--config", str(tmp_path / "cluster.yaml"), "--data-dir", str(tmp_path / "data"))
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "data" / "cluster.json").exists()


async def test_the_first_job_of_the_readme_runs(controller: tuple[ScriptedController, str], tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None and len(code[1].strip().splitlines()) <= 10
    program = code[1].replace("demo:smollm2", str(tmp_path))
    done = await run(program=("-c", program), env={"NEREUS_TARGET": controller[1]})
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "state {'state': 'succeeded'}"
