"""Ports for processes that are told beforehand where they will listen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

from nereus_common.core.errors import ResourceExhausted

LOWEST, HIGHEST = 10_000, 65_535
"""Below are the ports that people know services by."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LINUX_EPHEMERAL = (32_768, 60_999)
_FEWEST = 1_000
_ATTEMPTS = 100


def free_port() -> int:
    """A port that nothing holds, at random; ResourceExhausted when none is found.

    Not one of those that the kernel hands out itself, to connections and to listeners on port 0: of these any may be
    taken before whoever is told it listens there. (Where the kernel hands out nearly all, one of those.)
    """
    first, last = _ephemeral()
    ports = [port for port in range(LOWEST, HIGHEST + 1) if not first <= port <= last]
    if len(ports) < _FEWEST:
        ports = list(range(LOWEST, HIGHEST + 1))
    for port in random.SystemRandom().sample(ports, _ATTEMPTS):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(port)
    raise ResourceExhausted(
        f"of {_ATTEMPTS} ports tried on this host none is free", remedy="stop what listens there (see `ss -ltnp`)"
    )


def usable_port(host: str, wanted: int, user: str) -> int:
    """`wanted`, which `user` is to listen on at `host`, or a free one for 0; ResourceExhausted when it is taken."""
    if not wanted:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as taken:
            raise ResourceExhausted(
                f"port {wanted} on {host} cannot be used by the {user}: {taken.strerror}",
                remedy=f"stop what uses it (see `ss -ltnp 'sport = :{wanted}'`), or choose another port",
                port=wanted,
                user=user,
            ) from taken
    return wanted


def _ephemeral() -> tuple[int, int]:
    try:
        first, last = EPHEMERAL.read_text().split()
    except OSError:
        return _LINUX_EPHEMERAL
    return int(first), int(last)
