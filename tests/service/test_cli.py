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

from nereus.v1 import jobs_pb2 as pb
from tests.service.scripted_controller import ScriptedController, scripted_controller

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
