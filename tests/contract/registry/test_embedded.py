"""The embedded server as a process: it outlives its starter, is found again, and loses nothing it acknowledged."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nereus_common.core.emu import Phase
from nereus_common.core.errors import ProcessLost, ResourceExhausted, StaleEpoch, Unavailable
from nereus_common.core.ids import DeviceId
from nereus_common.registry import Device, JobRecord, embedded, open_registry
from nereus_common.rpc.ports import free_port

from .conftest import JOB, make_plan, make_unit

START = (
    "import sys, pathlib; from nereus_common.registry import embedded; print(embedded.start(pathlib.Path(sys.argv[1])))"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / 'a "data" %41?#folder'
    yield folder
    embedded.stop(folder)


def kill(server: embedded.EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while embedded.find(server.data_dir) is not None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_server_outlives_the_command_that_started_it_and_its_process_group(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", START, str(folder)], start_new_session=True) as command:
        assert command.wait(60) == 0
        server = embedded.find(folder)
        assert server is not None
        assert os.getpgid(server.pid) != command.pid
        assert os.getsid(server.pid) != command.pid


def test_a_second_start_finds_the_first(folder: Path) -> None:
    assert embedded.find(folder) is None
    server = embedded.start(folder)
    assert embedded.start(folder, port=1) == server == embedded.find(folder)


def test_starts_that_race_end_with_one_server(folder: Path) -> None:
    started: list[embedded.EmbeddedServer] = []
    threads = [threading.Thread(target=lambda: started.append(embedded.start(folder))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(started) == 5
    assert len({server.pid for server in started}) == 1


def test_stop_ends_the_process_once(folder: Path) -> None:
    server = embedded.start(folder)
    assert embedded.stop(folder) is True
    assert not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
    assert embedded.stop(folder) is False
    assert embedded.find(folder) is None


def test_a_pid_that_now_belongs_to_another_process_is_not_taken_for_the_server(folder: Path) -> None:
    embedded.start(folder)
    embedded.stop(folder)
    (folder / "valkey.pid").write_text(str(os.getpid()))
    assert embedded.find(folder) is None
    assert embedded.stop(folder) is False


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceExhausted, match=f"port {port} on 127.0.0.1"):
            embedded.start(folder, port=port)


async def test_on_loopback_it_asks_for_a_password_that_only_the_owner_can_read(folder: Path) -> None:
    port = free_port()
    server = embedded.start(folder, port=port)
    async with await open_registry(server.url) as registry:
        assert await registry.raise_epoch() == 1
    with pytest.raises(Unavailable, match=rf"redis://127.0.0.1:{port}/0 refuses this user"):
        await open_registry(f"redis://127.0.0.1:{port}/0")
    for name in ("valkey.conf", "valkey.url"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


async def test_a_folder_too_deep_for_a_socket_gets_a_loopback_port(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    server = embedded.start(folder)
    try:
        async with await open_registry(server.url) as registry:
            assert server.url.startswith("redis://")
            assert await registry.epoch() == 0
    finally:
        embedded.stop(folder)


async def test_everything_acknowledged_is_there_after_kill_9_and_a_restart(folder: Path) -> None:
    server = embedded.start(folder)
    device, unit = DeviceId("node0", "cpu0"), make_unit()
    async with await open_registry(server.url) as registry:
        await registry.put_device(Device(device, "cpu", 100))
        await registry.grant(unit.id, "train", {device: 60})
        lease = await registry.acquire_lease("coordinator", "c", 3600.0)
        await registry.put_job(JobRecord(JOB, "{}", 1.0), expected=0)
        await registry.commit_plan(JOB, 0, make_plan(), fence=lease.fence)
        await registry.put_unit(unit, expected=0, fence=lease.fence)
        await registry.put_unit(replace(unit, phase=Phase.PREPARED), expected=1)
        last = [await registry.append_event(JOB, "step", {"n": n}, time=0.0) for n in range(20)][-1]

        async def everything() -> tuple[object, ...]:
            (held,) = await registry.leases()
            return (
                *(await registry.devices(), await registry.grants(), held.lease, held.alive),
                *(await registry.jobs(), await registry.get_plan(JOB), await registry.units(JOB)),
                *(await registry.read_events(JOB), await registry.epoch()),
            )

        before = await everything()
        kill(server)
        with pytest.raises(Unavailable, match=r"valkey\.sock cannot be reached"):
            await registry.epoch()
        assert embedded.start(folder).pid != server.pid
        assert await everything() == before
        assert await registry.append_event(JOB, "step", {}, time=0.0) == last + 1
        await registry.renew_lease(lease)


async def test_whatever_was_acknowledged_before_a_kill_in_mid_write_is_there(folder: Path) -> None:
    server = embedded.start(folder)
    acknowledged = 0
    async with await open_registry(server.url) as registry:
        killer = threading.Timer(0.3, kill, [server])
        killer.start()
        with pytest.raises(Unavailable):
            while True:
                acknowledged = await registry.append_event(JOB, "step", {}, time=0.0)
        killer.join()
        embedded.start(folder)
        kept = (await registry.read_events(JOB, limit=100_000))[-1].revision
    assert acknowledged > 0
    # The one whose answer was lost may be there or not.
    assert kept - acknowledged in (0, 1)


async def test_a_store_that_lost_acknowledged_writes_is_refused_on_reconnect(folder: Path, tmp_path: Path) -> None:
    server = embedded.start(folder)
    async with await open_registry(server.url) as registry:
        await registry.commit_plan(JOB, 0, make_plan())
        embedded.stop(folder)
        shutil.copytree(folder / "appendonlydir", tmp_path / "backup")
        embedded.start(folder)
        assert (await registry.get_plan(JOB)).epoch == 1
        await registry.commit_plan(JOB, 1, make_plan(1024))
        embedded.stop(folder)
        shutil.rmtree(folder / "appendonlydir")
        shutil.copytree(tmp_path / "backup", folder / "appendonlydir")
        embedded.start(folder)
        for _ in range(2):
            with pytest.raises(StaleEpoch, match="is at registry epoch 1, but 2 has been seen"):
                await registry.get_plan(JOB)
    with pytest.raises(StaleEpoch, match="but 2 has been seen"):
        await open_registry(server.url, known_epoch=2)
    async with await open_registry(server.url, known_epoch=1) as fresh:
        assert (await fresh.get_plan(JOB)).epoch == 1


def test_a_data_folder_that_is_damaged_stops_the_start_with_the_end_of_the_log(folder: Path) -> None:
    embedded.start(folder)
    embedded.stop(folder)
    (log,) = (folder / "appendonlydir").glob("*.incr.aof")
    log.write_text("what is this\n" * 100)
    with pytest.raises(ProcessLost, match="died while starting") as lost:
        embedded.start(folder)
    assert "append only file" in lost.value.details["log"]


async def test_a_waiting_reader_learns_that_the_server_died(folder: Path) -> None:
    server = embedded.start(folder)
    async with await open_registry(server.url) as registry:
        killer = threading.Timer(0.3, kill, [server])
        killer.start()
        with pytest.raises(Unavailable):
            await registry.read_events(JOB, wait=60.0)
        killer.join()
