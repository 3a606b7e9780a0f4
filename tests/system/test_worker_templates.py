"""Workers that are forked from a process which has imported what they need."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from nereus_common.workers import Worker, WorkerError, WorkerSpec, processes

BODIES = Path(__file__).parent / "bodies"


@pytest.fixture(autouse=True)
def _bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BODIES))


def desk(folder: Path) -> WorkerSpec:
    return WorkerSpec("desk", "worker_bodies:Desk", {}, folder / "l", preload=("worker_bodies",))


async def test_a_worker_whose_template_is_killed_is_lost_and_the_next_has_another(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    template = parent_of(worker.pid)
    os.kill(template, signal.SIGKILL)
    lost = await asyncio.wait_for(worker.exited, 10)
    assert "was killed by SIGKILL" in str(lost)
    await worker.stop()
    again = await Worker.start(desk(tmp_path), timeout=60)
    assert parent_of(again.pid) != template
    await again.stop()


async def test_forked_workers_share_one_template_and_have_names_of_their_own(tmp_path: Path) -> None:
    specs = [replace(desk(tmp_path), name=name) for name in ("first", "second")]
    workers = [await Worker.start(spec, timeout=60) for spec in specs]
    assert len({parent_of(worker.pid) for worker in workers}) == 1
    for worker in workers:
        command = command_of(worker.pid)
        assert worker.spec.name in command and "nereus_common.workers.child" in command
        assert os.getpgid(worker.pid) == worker.pid
        await worker.stop()


async def test_what_cannot_be_imported_beforehand_is_told_by_the_worker(tmp_path: Path) -> None:
    spec = WorkerSpec("lost", "no_such_module:Desk", {}, tmp_path / "l", preload=("no_such_module",))
    with pytest.raises(WorkerError, match="no_such_module"):
        await Worker.start(spec, timeout=60)


def parent_of(pid: int) -> int:
    process = processes.read(pid)
    assert process is not None
    return process.parent


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
