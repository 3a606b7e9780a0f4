"""However a service or its reaper dies, nothing of its workers stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from nereus_common.workers import Worker, WorkerSpec, processes
from nereus_common.workers.processes import Identity, Segment
from nereus_common.workers.reaping import ReaperLink

BODIES = Path(__file__).parent / "bodies"


PRELOAD: list[str] = []
"""Of the workers of a test: each runs with a process that was executed, and with one that was forked."""


@pytest.fixture(autouse=True, params=["executed", "forked"])
def _bodies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BODIES))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(globals(), "PRELOAD", ["worker_bodies"] if request.param == "forked" else [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_service_leaves_no_process_and_no_segment(tmp_path: Path, number: signal.Signals) -> None:
    path = os.pathsep.join([str(BODIES), *(entry or os.getcwd() for entry in sys.path)])
    command = [sys.executable, str(BODIES / "worker_service.py"), str(tmp_path), *PRELOAD]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as service:
        assert service.stdout is not None
        told = json.loads(service.stdout.readline())
        assert all(living(pid) for pid in told["pids"])
        assert (Path("/dev/shm") / told["segment"]).exists()
        service.send_signal(number)
    wait_until(lambda: not any(living(pid) for pid in told["pids"]))
    assert not (Path("/dev/shm") / told["segment"]).exists()


async def test_stop_takes_grandchildren_and_segments_along(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    children = await worker.call("breed", timeout=10)
    segment = await worker.call("map_segment", 1 << 16, timeout=10)
    await asyncio.sleep(1.2)
    os.kill(worker.pid, signal.SIGKILL)
    await asyncio.wait_for(worker.exited, 10)
    await worker.stop()
    assert not any(living(pid) for pid in children)
    assert not (Path("/dev/shm") / segment).exists()


async def test_a_segment_that_another_process_maps_stays(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    name = await worker.call("map_segment", 1 << 16, timeout=10)
    ours = shared_memory.SharedMemory(name)
    await asyncio.sleep(1.2)
    await worker.stop(grace=0)
    assert (Path("/dev/shm") / name).exists()
    ours.close()
    ours.unlink()


async def test_a_killed_reaper_is_started_again_and_told_everything(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    children = await worker.call("breed", timeout=10)
    segment = await worker.call("map_segment", 1 << 16, timeout=10)
    old = ReaperLink.shared().pid
    os.kill(old, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: ReaperLink.shared().pid != old)
    await asyncio.sleep(2)
    await worker.stop(grace=0)
    assert not any(living(pid) for pid in children)
    assert not (Path("/dev/shm") / segment).exists()


async def test_a_reaper_killed_in_a_sweep_answers_after_its_restart(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    os.kill(ReaperLink.shared().pid, signal.SIGKILL)
    await worker.stop(grace=0)
    assert not living(worker.pid)


def test_a_recycled_pid_is_never_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        now = processes.identify(stranger.pid)
        assert now is not None
        processes.kill(Identity(now.pid, now.start - 1))
        table = processes.snapshot()
        assert processes.family(Identity(now.pid, now.start - 1), (), table) == set()
        time.sleep(0.1)
        assert living(stranger.pid)


def test_a_segment_that_took_the_name_of_another_stays() -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{segment.name}"
    processes.unlink(Segment(path, os.stat(path).st_ino + 1))
    assert Path(path).exists()
    assert Segment(path, os.stat(path).st_ino) in processes.segments(os.getpid())
    segment.close()
    segment.unlink()
    resource_tracker.ensure_running()


def desk(folder: Path) -> WorkerSpec:
    return WorkerSpec("desk", "worker_bodies:Desk", {}, folder / "desk.log", preload=tuple(PRELOAD))


def living(pid: int) -> bool:
    process = processes.read(pid)
    return process is not None and process.alive


def wait_until(condition: Callable[[], bool], within: float = 15.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
