"""The stores under test: one in memory, and servers that are really started."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from nereus_common.core.emu import Unit
from nereus_common.core.ids import DeviceId, JobId, ModelStage, TransitionId, UnitId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.registry import Registry, TransitionRecord, embedded, open_registry
from nereus_common.rpc.ports import free_port

KEPT = 50
"""Events kept per job in these tests."""

JOB = JobId("job-1")
SERVERS = ("valkey", "valkey-cluster", "redis")


@dataclass
class Store:
    """A store that several clients can open. `url` is None for the one in memory."""

    url: str | None
    _memory: Registry | None = field(default=None)

    async def client(self) -> Registry:
        if self.url is not None:
            return await open_registry(self.url, events_kept=KEPT)
        if self._memory is None:
            self._memory = await open_registry("memory://", events_kept=KEPT)
        return self._memory

    def empty(self) -> None:
        if self.url is not None:
            with redis.Redis.from_url(self.url) as client:
                client.flushall()


@contextlib.contextmanager
def serving(binary: str, folder: Path, *options: str) -> Iterator[str]:
    """A server of ours on loopback, ended with the block; yields its URL."""
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always", *options]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"redis://127.0.0.1:{port}/0"
            await_answer(url)
            yield url
        finally:
            process.terminate()
            process.wait(10)


def await_answer(url: str) -> None:
    until = time.monotonic() + 20
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def valkey_binary() -> str:
    return str(embedded._binary())


@contextlib.contextmanager
def _valkey(folder: Path) -> Iterator[str]:
    server = embedded.start(folder)
    try:
        yield server.url
    finally:
        embedded.stop(folder)


@contextlib.contextmanager
def cluster_of_one(folder: Path) -> Iterator[str]:
    """One node that owns all slots: it refuses a script whose keys lie in two of them."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with serving(valkey_binary(), folder, *options) as url, redis.Redis.from_url(url) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until = time.monotonic() + 20
        while client.cluster("info")["cluster_state"] != "ok":
            assert time.monotonic() < until, "the cluster of one node did not form"
            time.sleep(0.05)
        yield url


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[str]:
    binary = shutil.which("redis-server", path=os.defpath + os.pathsep + os.environ.get("PATH", ""))
    if binary is None:
        pytest.skip("REDIS NOT TESTED: no redis-server on the PATH; `apt-get install redis-server` provides it")
    with serving(binary, folder) as url:
        yield url


@pytest.fixture(scope="session", params=[pytest.param("memory", marks=pytest.mark.fast), *SERVERS])
def _running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    if request.param == "memory":
        yield None
        return
    start = {"valkey": _valkey, "valkey-cluster": cluster_of_one, "redis": _redis}[request.param]
    with start(tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def store(_running: str | None) -> Store:
    fresh = Store(_running)
    fresh.empty()
    return fresh


@pytest.fixture
async def registry(store: Store) -> AsyncIterator[Registry]:
    async with await store.client() as client:
        yield client


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Registry]:
    """A second client of the same store."""
    async with await store.client() as client:
        yield client


def make_unit(name: str = "u0", *, epoch: int = 1, job: JobId = JOB) -> Unit:
    devices = (DeviceId("node0", "cpu0"), DeviceId("node0", "cpu1"))
    return Unit(UnitId(name), job, ModelStage.parse("actor/training"), 0, Layout.parse("tp2.pp1.fs1"), devices, epoch)


def make_plan(microbatch_tokens: int = 512) -> Plan:
    training = StagePlan(Layout(fs=2), (DeviceId("n", "cpu0"), DeviceId("n", "cpu1")), 1, microbatch_tokens)
    generation = StagePlan(Layout(), (DeviceId("n", "cpu2"),), generation=GenerationLimits())
    names = ModelStage.parse("actor/training"), ModelStage.parse("actor/generation")
    return Plan(((names[0], training), (names[1], generation)))


def make_transition(name: str = "t1", created: float = 1.0) -> TransitionRecord:
    return TransitionRecord(TransitionId(name), JOB, 1, make_plan(), make_plan(1024), created)
