"""The transport beside `ucx_perftest`: same machine, transports and chunk size, 1 GiB of distinct memory each side.

Peer and limit: `ucx_perftest -t tag_bw`, which moves the same bytes with no pieces, no pins, no digests and no Python.
It is run twice: with messages of one chunk, whose single buffer stays in the cache, and with one message of 1 GiB,
which has memory to read and write as a pull has. `perftest_ratio` is against the latter.

- wire: contiguous memory, digests off, received into a ring of 1 GiB: what the protocol and its threads cost;
- verified: as it is used: digests on both sides, a ring of 48 MiB, every piece copied to where it belongs;
- packed: the same with strided pieces, which the source packs.
"""

from __future__ import annotations

import os
import re
import secrets
import statistics
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nereus_common.core.errors import NereusError
from nereus_common.transport.lane import TLS, Reach
from nereus_common.transport.probe import Probe, Role

BYTES = 1 << 30
CHUNK = 4 << 20
REPEAT = 5
"""Pulls per case; the first one is not counted, the median of the others is told."""


class PerftestFailed(NereusError):
    """`ucx_perftest` did not run to its end."""


def run() -> dict[str, Any]:
    metrics: dict[str, Any] = {"bytes": BYTES, "chunk_bytes": CHUNK}
    for reach in Reach:
        perftest = {
            "perftest_gb_per_s": _perftest(reach, BYTES, 8),
            "perftest_cached_gb_per_s": _perftest(reach, CHUNK, 8 * BYTES // CHUNK),
        }
        wire = _pull(reach, Role(BYTES, {"digest": False, "ring": BYTES // CHUNK}))
        of_reach = {
            "gb_per_s": wire,
            "perftest_ratio": wire / perftest["perftest_gb_per_s"],
            "perftest_cached_ratio": wire / perftest["perftest_cached_gb_per_s"],
            "verified_gb_per_s": _pull(reach, Role(BYTES, land=True)),
            "packed_gb_per_s": _pull(reach, Role(BYTES, land=True, strided=True)),
        }
        metrics |= {_named(reach, name): value for name, value in (of_reach | perftest).items()}
    return metrics


def _named(reach: Reach, metric: str) -> str:
    """Within a node the plain name, which is the one that has a target."""
    return metric if reach is Reach.NODE else f"{reach}_{metric}"


def _pull(reach: Reach, role: Role) -> float:
    """GB/s (10⁹ bytes) between two processes, the median pull."""
    settings = {"chunk_bytes": CHUNK} | dict(role.settings)
    away = {"host": "127.0.0.1", "node": f"elsewhere-{secrets.token_hex(4)}"} if reach is Reach.NETWORK else {}
    with Probe(Role(BYTES, settings | away | {"ring": 12})) as source:
        address = source.answer()["address"]
        pulling = Role(BYTES, settings, address, repeat=REPEAT, strided=role.strided, land=role.land)
        with Probe(pulling) as puller:
            answers = [puller.answer() for _ in range(REPEAT)]
    return statistics.median(float(answer["bytes"] / answer["seconds"]) / 1e9 for answer in answers[1:])


def _perftest(reach: Reach, message: int, times: int) -> float:
    """GB/s of `ucx_perftest` with messages of `message` bytes, `times` of them."""
    spec = find_spec("libucx")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent
    tls = TLS[reach] if reach is Reach.NODE else "tcp"
    env = os.environ | {"LD_LIBRARY_PATH": str(home / "lib"), "UCX_TLS": tls, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(home / "bin/ucx_perftest"), "-p", str(20000 + secrets.randbelow(20000))]
    test = ["-t", "tag_bw", "-s", str(message), "-n", str(times), "-w", "2", "-O", "6", "-f"]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            client = subprocess.run(
                [*command, "127.0.0.1", *test], env=env, capture_output=True, text=True, check=False, timeout=300
            )
            if client.returncode == 0:
                return _bandwidth(client.stdout)
            if server.poll() is not None:
                break
        raise PerftestFailed(f"ucx_perftest ended with {client.returncode}: {client.stderr[-500:]}")
    finally:
        server.kill()
        server.wait(10)


def _bandwidth(output: str) -> float:
    """The overall bandwidth of the final line, in GB/s; perftest counts in MiB."""
    numbers = re.findall(r"[\d.]+", output.strip().splitlines()[-1])
    return float(numbers[5]) * 2**20 / 1e9
