"""A cluster comes up whole or not at all, is mended where a part of it died, and leaves nothing when it goes down.

The registry is the real embedded server; the services are small processes with the real gRPC server and health check,
so that what is tested is the starting and stopping, not what they do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import ORDER, down
from nereus.cluster.launch import SERVICES
from nereus.cluster.memory import PeakMemory
from nereus.cluster.mend import dead
from nereus.cluster.state import ClusterFolder, Member
from nereus.cluster.up import up
from nereus_common.core.errors import Conflict, DeadlineExceeded, NotFound, ProcessLost, ResourceExhausted
from nereus_common.workers import processes

SERVICE = """
    import os, subprocess, sys
    from nereus_common.config import ServiceSettings
    from nereus_common.rpc.server import RpcServer, run

    settings = ServiceSettings.from_argv(sys.argv[1:], os.environ)
    print("settings read by", settings.name, flush=True)

    async def drain():
        pass

    async def serve():
        server = RpcServer(settings.name, settings.host, settings.port)
        {extra}
        await server.start()
        await server.serve(drain, 1.0)

    raise SystemExit(run(serve(), settings.name))
"""
LITTER = """
        holder = "import mmap, sys, time; file = open(sys.argv[1], 'w+b'); file.truncate(4096);"
        holder += "kept = mmap.mmap(file.fileno(), 4096); time.sleep(600)"
        segment = f"/dev/shm/nereus_test_{os.getpid()}"
        subprocess.Popen([sys.executable, "-c", holder, segment], start_new_session=True)
        print("segment", segment, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ClusterFolder]:
    made = ClusterFolder(tmp_path / "data")
    yield made
    if made.read() is not None:
        down(made, grace=5)


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the five services, found before the real ones."""
    path = tmp_path / "packages"
    for name in SERVICES:
        write_service(path, name)
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return path


def write_service(path: Path, name: str, extra: str = "pass") -> None:
    package = path / f"nereus_{name}"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        textwrap.dedent(SERVICE).replace("{extra}", textwrap.dedent(extra).strip().replace("\n", "\n    "))
    )


def config(**changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"start_seconds": 60, "stop_seconds": 10, **changes})


def marked(mark: str) -> set[processes.Identity]:
    return processes.alive(processes.marked(mark, table := processes.snapshot()), table)


def test_a_cluster_comes_up_is_found_again_and_leaves_nothing(folder: ClusterFolder, services: Path) -> None:
    state = up(folder, config())
    assert {member.name for member in state.members} == {*SERVICES, "registry"}
    assert all(member.alive for member in state.members)
    assert folder.file.stat().st_mode & 0o077 == 0
    assert up(folder, config()) == state
    assert folder.read() == state
    with PeakMemory(state) as memory:
        pass
    assert memory.bytes > 50 << 20
    result = down(folder)
    assert set(result.stopped) == {*ORDER, "registry"}
    assert (result.killed, result.swept_processes, result.swept_segments) == ((), 0, 0)
    assert not any(member.alive for member in state.members)
    assert not marked(state.mark)
    with pytest.raises(NotFound, match="nereus up"):
        down(folder)


def test_what_a_service_left_behind_is_swept(folder: ClusterFolder, services: Path) -> None:
    write_service(services, "generation", LITTER)
    state = up(folder, config())
    generation = state.member("generation")
    assert generation is not None
    lines = Path(generation.log).read_text().splitlines()
    segment = Path(next(line.split()[1] for line in lines if line.startswith("segment")))
    until = time.monotonic() + 20
    while not any(str(segment) in one.path for pid in processes.snapshot() for one in processes.segments(pid)):
        assert time.monotonic() < until, "the stranger never mapped its segment"
        time.sleep(0.05)
    result = down(folder, grace=10)
    assert result.swept_processes == 1
    assert result.swept_segments == 1
    assert not segment.exists() and not marked(state.mark)


def test_a_service_that_dies_while_starting_ends_the_rest_and_shows_its_log(
    folder: ClusterFolder, services: Path
) -> None:
    write_service(services, "training", "raise RuntimeError('no such accelerator')")
    with pytest.raises(ProcessLost, match=r"training .* ended while it was starting") as lost:
        up(folder, config())
    assert "no such accelerator" in lost.value.details["log"]
    assert folder.read() is None
    assert not [one for one in processes.snapshot() if str(folder.path) in command_line(one)]


def test_a_service_that_never_serves_is_given_up(folder: ClusterFolder, services: Path) -> None:
    write_service(services, "inference", "import asyncio; await asyncio.sleep(600)")
    with pytest.raises(DeadlineExceeded, match=r"inference .* does not serve"):
        up(folder, config(start_seconds=6))
    assert folder.read() is None


def test_a_port_that_is_taken_is_named_and_nothing_is_started(folder: ClusterFolder, services: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ResourceExhausted, match=f"port {port} on 127.0.0.1 cannot be used by the controller"):
            up(folder, config(controller_port=port))
    assert folder.read() is None


def kill(member: Member) -> None:
    os.kill(member.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while member.alive and time.monotonic() < until:
        time.sleep(0.05)


def test_what_died_of_a_cluster_starts_again_in_its_place_and_is_named(folder: ClusterFolder, services: Path) -> None:
    state = up(folder, config())
    victims = [member for member in state.members if member.name in ("coordinator", "controller")]
    others = {member for member in state.members if member not in victims}
    for victim in victims:
        kill(victim)
    said: list[str] = []
    mended = up(folder, config(devices={"another": 1 << 30}), report=said.append)
    assert said[0] == "coordinator, controller had died"
    assert others <= set(mended.members) and len(mended.members) == len(state.members)
    assert all(member.alive for member in mended.members)
    assert {m.name: m.target for m in mended.members} == {m.name: m.target for m in state.members}
    assert (mended.mark, mended.controller, mended.devices) == (state.mark, state.controller, state.devices)
    assert folder.read() == mended
    log = Path(next(member.log for member in mended.members if member.name == "controller"))
    assert log.read_text().count("settings read by controller") == 2
    assert not down(folder).killed
    assert not marked(state.mark)


def test_what_cannot_start_again_leaves_the_rest_running(folder: ClusterFolder, services: Path) -> None:
    state = up(folder, config())
    victim = state.member("training")
    assert victim is not None
    kill(victim)
    write_service(services, "training", "raise RuntimeError('no such accelerator')")
    with pytest.raises(ProcessLost, match=r"training .* ended while it was starting"):
        up(folder, config())
    assert dead(folder.require()) == ["training"]
    write_service(services, "training")
    assert dead(up(folder, config())) == []
    down(folder)


def test_services_that_lost_their_registry_start_again_with_it(folder: ClusterFolder, services: Path) -> None:
    state = up(folder, config())
    victim = state.member("registry")
    assert victim is not None
    kill(victim)
    mended = up(folder, config())
    assert dead(mended) == []
    assert {one.pid for one in mended.members}.isdisjoint(one.pid for one in state.members)
    assert mended.controller == state.controller
    down(folder)
    assert not marked(state.mark)


def test_the_status_of_a_wounded_cluster_names_who_died_and_what_to_run(folder: ClusterFolder, services: Path) -> None:
    state = up(folder, config())
    victim = state.member("controller")
    assert victim is not None
    kill(victim)
    command = [sys.executable, "-m", "nereus", "status", "--data-dir", str(folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "controller died; `nereus up` starts what is missing again" in done.stderr
    assert [line for line in done.stdout.splitlines() if "controller" in line and line.rstrip().endswith("no")]
    down(folder)


def test_the_cluster_outlives_the_command_that_started_it(folder: ClusterFolder, services: Path) -> None:
    command = [sys.executable, "-m", "nereus", "up", "--json", "--data-dir", str(folder.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    state = folder.require()
    assert all(member.alive for member in state.members)
    done = subprocess.run(
        [sys.executable, "-m", "nereus", "down", "--json", "--data-dir", str(folder.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"swept_processes": 0' in done.stdout
    assert not marked(state.mark)


def test_two_commands_do_not_change_one_folder_at_once(folder: ClusterFolder) -> None:
    with folder.locked(), pytest.raises(Conflict, match="at work"), folder.locked():
        pass


def command_line(pid: int) -> str:
    try:
        return (processes.PROC / str(pid) / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
