"""The link to a Redis or Valkey server: deadlines, errors that name the server, and the check against going back.

The only module that speaks to the server. Nothing is retried here: after a lost answer a compare-and-set may have
happened, and only the caller can tell what that means.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis import asyncio as aioredis
from redis import exceptions as said
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from nereus_common.core.errors import InvalidInput, NereusError, ResourceExhausted, Unavailable
from nereus_common.registry import refusals
from nereus_common.registry.scripts import EPOCH, script

log = logging.getLogger(__name__)

OLDEST = (6, 2)
MAX_CONNECTIONS = 256
Argument = str | int | float
Command = Sequence[Argument]


class Link:
    """`timeout`: seconds for any one exchange. `replicas`: how many must confirm each write (WAIT) before it counts."""

    def __init__(self, url: str, *, timeout: float, replicas: int, known_epoch: int) -> None:
        self.name = redacted(url)
        self.timeout = timeout
        self.known_epoch = known_epoch
        self._replicas = replicas
        try:
            self._pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout,
                protocol=2,
                decode_responses=True,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
                redis_connect_func=self._greet,
            )
        except ValueError as wrong:
            raise InvalidInput(f"registry URL {self.name}: {wrong}", field="url") from wrong
        # Also where the URL says otherwise: the library would send under `asyncio.wait_for`, which in Python 3.11 loses
        # the cancellation of its caller where the bytes have just gone out. `_named` bounds every exchange.
        self._pool.connection_kwargs["socket_timeout"] = None
        self._client = aioredis.Redis.from_pool(self._pool)
        self._execute: Callable[..., Awaitable[Any]] = self._client.execute_command

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script; return its answer once the server, and as many replicas as asked for, have it."""
        evaluate: Command = ("EVAL", script(name), len(keys), *keys, *args)
        patience = max(1, int(self.timeout * 500))
        wait: Sequence[Command] = [("WAIT", self._replicas, patience)] if self._replicas else []
        async with self._named(self.timeout):
            answer, *waited = await self._send([evaluate, *wait])
        confirmed = waited[0] if waited else 0
        if confirmed < self._replicas:
            raise Unavailable(
                f"registry {self.name} wrote {name}, but {confirmed} of {self._replicas} replicas confirmed it",
                remedy="read before trying again; bring the replicas back, or ask for fewer",
            )
        return answer

    async def ask(self, *commands: Command, extra: float = 0.0) -> list[Any]:
        """Send reading commands in order over one connection; return their answers. `extra`: seconds they may block.

        Sent once more when the connection breaks: an idle one may have outlived a restart of the server.
        """
        async with self._named(self.timeout + extra):
            try:
                return await self._send(commands)
            except said.ConnectionError:
                return await self._send(commands)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        try:
            if len(commands) == 1:
                return [await self._execute(*commands[0])]
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute())
        except said.ConnectionError:
            # Where one is broken, so are those that idled beside it; each would fail a caller of its own.
            await self._pool.disconnect(inuse_connections=False)
            raise

    async def close(self) -> None:
        await self._client.aclose()

    def saw(self, epoch: int, known: int) -> int:
        """Remember the highest epoch; refuse a store that is behind `known`, what was known before it was asked.

        What is known by the time it answers may be more: answers on several connections overtake each other.
        """
        if epoch < known:
            raise refusals.gone_back(f"registry {self.name}", epoch, known)
        self.known_epoch = max(self.known_epoch, epoch)
        return epoch

    async def _greet(self, connection: AbstractConnection) -> None:
        """On every new connection: compare the store's epoch with the highest known, before anything is asked."""
        await connection.on_connect()
        known = self.known_epoch
        await connection.send_command("GET", EPOCH)
        try:
            self.saw(int(await connection.read_response() or 0), known)
        except NereusError:
            # An open connection would be handed out again without a second greeting.
            await connection.disconnect()
            raise

    @asynccontextmanager
    async def _named(self, seconds: float) -> AsyncIterator[None]:
        """Turn what the client library raises into errors that name the server and say what to do."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, said.TimeoutError) as late:
            raise Unavailable(
                f"registry {self.name} did not answer within {seconds:g} s",
                remedy="check that the server runs and is reachable; trying again may help",
                url=self.name,
            ) from late
        except said.RedisError as error:
            raise _translated(self.name, error) from error

    async def inspect(self) -> None:
        """Refuse a server that is too old; warn where acknowledged writes could be lost."""
        (info,) = await self.ask(("INFO", "server"))
        version = _version(info)
        if version < OLDEST:
            raise Unavailable(
                f"registry {self.name} runs version {'.'.join(map(str, version))}",
                remedy="use Redis 6.2 or newer, or Valkey",
                url=self.name,
            )
        try:
            (appending,) = await self.ask(("CONFIG GET", "append*"))
            (memory,) = await self.ask(("CONFIG GET", "maxmemory*"))
        except Unavailable as refused:
            if not isinstance(refused.__cause__, said.ResponseError):
                raise
            log.info("registry %s does not show its configuration; durability is not checked", self.name)
            return
        for complaint in _complaints(appending | memory):
            log.warning("registry %s: %s", self.name, complaint)


def redacted(url: str) -> str:
    """The URL without its password, for messages and logs."""
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^/@:]*):[^/]*@", r"\1:***@", url))


def _translated(name: str, error: said.RedisError) -> NereusError:
    what, remedy = "cannot be reached", "start it (`nereus up` starts an embedded one) or correct the URL"
    text = str(error)
    if isinstance(error, said.AuthenticationError | said.AuthorizationError | said.NoPermissionError):
        what, remedy = "refuses this user", "give a user and password that may run scripts, in the URL"
    elif isinstance(error, said.BusyLoadingError):
        what, remedy = "is still loading its data", "try again in a moment"
    elif isinstance(error, said.OutOfMemoryError) or text.startswith("OOM"):
        return ResourceExhausted(f"registry {name} is out of memory: {text}", remedy="raise its maxmemory", url=name)
    elif isinstance(error, said.ResponseError):
        what, remedy = "refuses the command", "see the server's log: disk, role (replica?) and user rights"
    return Unavailable(f"registry {name} {what}: {text}", remedy=remedy, url=name)


def _version(info: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])


def _complaints(config: dict[str, str]) -> list[str]:
    found = []
    if config.get("appendonly") == "no":
        found.append("appendonly is off: a crash loses acknowledged writes; set `appendonly yes`")
    elif config.get("appendfsync", "always") != "always":
        found.append("a crash can lose the last second of acknowledged writes; set `appendfsync always`")
    if config.get("maxmemory", "0") != "0" and config.get("maxmemory-policy", "noeviction") != "noeviction":
        found.append("it may evict records when memory is short; set `maxmemory-policy noeviction`")
    return found
