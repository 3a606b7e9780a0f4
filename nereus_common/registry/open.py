"""From a URL to a registry."""

from __future__ import annotations

from nereus_common.core.errors import InvalidInput
from nereus_common.registry.base import EVENTS_KEPT, Registry
from nereus_common.registry.memory import MemoryRegistry

TIMEOUT = 10.0
"""Seconds for one exchange with the server."""


async def open_registry(
    url: str, *, timeout: float = TIMEOUT, known_epoch: int = 0, replicas: int = 0, events_kept: int = EVENTS_KEPT
) -> Registry:
    """The registry at `url`: `redis://`, `rediss://`, `unix://`, or `memory://` (a new one, for this process only).

    `known_epoch`: the highest registry epoch the caller knows; a store that is behind it has lost writes and is
    refused (StaleEpoch), now and on each later reconnect. `replicas`: how many must confirm each write. Unavailable
    names the URL, within `timeout` seconds; InvalidInput a URL of another kind.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryRegistry(events_kept=events_kept)
    if scheme not in ("redis", "rediss", "unix"):
        raise InvalidInput(
            f"registry URL {url!r} is not understood",
            remedy="write redis://HOST:PORT/0, rediss://…, unix:///PATH or memory://",
            field="url",
        )
    # Imported here, so that what runs on memory:// needs no client library.
    from nereus_common.registry.link import Link
    from nereus_common.registry.redis import RedisRegistry

    link = Link(url, timeout=timeout, replicas=replicas, known_epoch=known_epoch)
    try:
        await link.inspect()
    except BaseException:
        await link.close()
        raise
    return RedisRegistry(link, events_kept=events_kept)
