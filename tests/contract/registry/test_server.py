"""Opening a registry by URL, and servers that are absent, hang, refuse or have replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from nereus_common.core.errors import Conflict, InvalidInput, Unavailable
from nereus_common.registry import open_registry
from nereus_common.registry.link import redacted
from nereus_common.registry.scripts import script
from nereus_common.rpc.ports import free_port

from .conftest import cluster_of_one, serving, valkey_binary


@pytest.mark.fast
@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis-cluster://h"])
async def test_a_url_that_is_no_registry_says_what_one_looks_like(url: str) -> None:
    with pytest.raises(InvalidInput, match="write redis://HOST:PORT/0"):
        await open_registry(url)


@pytest.mark.fast
async def test_a_port_that_is_no_number_is_bad_input() -> None:
    with pytest.raises(InvalidInput, match="redis://host:abc/0"):
        await open_registry("redis://host:abc/0")


async def test_nobody_there_is_unavailable_and_names_url_and_remedy(tmp_path: Path) -> None:
    port = free_port()
    for url in (f"redis://127.0.0.1:{port}/0", f"unix://{tmp_path}/none.sock"):
        with pytest.raises(Unavailable, match=r"cannot be reached.*nereus up") as absent:
            await open_registry(url)
        assert absent.value.details["url"] == url


@contextlib.asynccontextmanager
async def mute() -> AsyncIterator[int]:
    """A server that accepts and never answers; yields its port."""
    held = []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.read()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for writer in held:
            writer.close()
        server.close()


async def test_a_server_that_hangs_is_given_up_at_the_deadline() -> None:
    async with mute() as port:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=rf"redis://:\*\*\*@127.0.0.1:{port}/0 did not answer within 0.4 s"):
            await open_registry(f"redis://:secret@127.0.0.1:{port}/0", timeout=0.4)
        assert time.monotonic() - began < 5


@pytest.mark.fast
@pytest.mark.parametrize(
    "url",
    ["redis://user:secret@h:1/0", "redis://:secret@h:1/0", "unix:///a.sock?db=1&password=secret&x=y", "redis://h/0"],
)
def test_a_password_never_shows(url: str) -> None:
    assert "secret" not in redacted(url)
    assert redacted("redis://h:1/0?db=2") == "redis://h:1/0?db=2"


async def test_a_server_without_a_durable_log_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lossy = ("--appendonly", "no", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with serving(valkey_binary(), tmp_path, *lossy) as url, caplog.at_level(logging.WARNING):
        await (await open_registry(url)).close()
    assert "set `appendonly yes`" in caplog.text
    assert "set `maxmemory-policy noeviction`" in caplog.text


async def test_a_server_that_hides_its_configuration_is_usable(tmp_path: Path) -> None:
    with serving(valkey_binary(), tmp_path, "--rename-command", "CONFIG", "") as url:
        async with await open_registry(url) as registry:
            assert await registry.raise_epoch() == 1


async def test_a_user_without_rights_is_told_so(tmp_path: Path) -> None:
    with serving(valkey_binary(), tmp_path, "--user", "default", "on", "nopass", "~*", "+@all", "-eval") as url:
        async with await open_registry(url) as registry:
            with pytest.raises(Unavailable, match=r"refuses this user.*may run scripts"):
                await registry.raise_epoch()


async def test_a_write_counts_once_the_replicas_asked_for_have_it(tmp_path: Path) -> None:
    for name in ("primary", "replica"):
        (tmp_path / name).mkdir()
    with serving(valkey_binary(), tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary:
        port = primary.rsplit(":", 1)[1].removesuffix("/0")
        async with await open_registry(primary, replicas=1, timeout=1.0) as registry:
            with pytest.raises(Unavailable, match="but 0 of 1 replicas confirmed it"):
                await registry.raise_epoch()
        with serving(valkey_binary(), tmp_path / "replica", "--replicaof", f"127.0.0.1 {port}") as replica:
            async with await open_registry(primary, replicas=1, timeout=10.0) as registry:
                assert await registry.raise_epoch() == 2
                lease = await registry.acquire_lease("coordinator", "first", 60.0)
                with pytest.raises(Conflict):
                    await registry.acquire_lease("coordinator", "second", 60.0)
            with redis.Redis.from_url(replica) as client:
                assert client.get("nereus:{pool}:epoch") == str(lease.fence).encode()
            async with await open_registry(replica) as registry:
                with pytest.raises(Unavailable, match=r"refuses the command.*read only replica"):
                    await registry.raise_epoch()


def test_the_server_in_cluster_mode_would_refuse_a_script_that_spans_two_tags(tmp_path: Path) -> None:
    with (
        cluster_of_one(tmp_path) as url,
        redis.Redis.from_url(url) as client,
        pytest.raises(redis.ResponseError, match="same slot"),
    ):
        client.eval(script("raise_epoch"), 2, "nereus:{pool}:epoch", "nereus:{job:a}:head")
