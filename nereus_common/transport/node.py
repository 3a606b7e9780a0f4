"""Who shares memory with whom, and what a transport's address says.

Two processes are on one node when they share the kernel, its IPC and network namespaces and /dev/shm: containers of one
machine that do not are as far apart as two machines.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from nereus_common.core.errors import InvalidInput


def node_identity() -> str:
    """A string that is equal exactly for processes that can use each other's shared memory and abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "net")]
    return "/".join([boot, *spaces, str(os.stat("/dev/shm").st_dev)])


@dataclass(frozen=True, slots=True)
class Address:
    """Where a transport is asked. `socket`: abstract Unix socket, for its own node; `host`, `port`: for the others,
    port 0 when there is none. Who shows `token` got the address from the job."""

    node: str
    socket: str
    host: str
    port: int
    token: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"{data[:60]!r} is not the address of a transport: {error}",
                remedy="pass `Transport.address` on unchanged",
                field="address",
            ) from None
