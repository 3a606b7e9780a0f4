"""A process that serves, pulls, or does both, over a known amount of memory: what `doctor` and the benchmark measure.

Run as a module with one JSON argument (`Role`); answers are JSON lines on stdout, among which UCX prints its own.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from nereus_common.core.errors import DeadlineExceeded, ProcessLost
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.transport.base import PullItem, PullRequest, Raw

_HOLDER = RankRef("probe", 0)
_TENSOR = TensorName("probe")
_COLUMNS = 4096
_PROTOCOL = re.compile(r"\|\s*\S+\.\.inf \| (?:\(\?\) )?(.+?)\s*\| (\S.*?)\s*\|")


@dataclass(frozen=True, slots=True)
class Role:
    """`bytes`: memory served or pulled. `address`: hex, of the source; empty: serve, and pull from it when `both`.

    `strided`: ask for all but the first column, so that every chunk has to be packed. `land`: copy what arrives into
    memory of its own.
    """

    bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    both: bool = False
    repeat: int = 1
    strided: bool = False
    land: bool = False
    seconds: float = 60.0


class Probe:
    """The parent's end. `protocols`: what UCX says it uses for large messages, as "method over devices"."""

    def __init__(self, role: Role, env: Mapping[str, str] | None = None) -> None:
        self._seconds = role.seconds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nereus_common.transport.probe", json.dumps(asdict(role))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="nereus-probe", daemon=True)
        self._reader.start()
        self.protocols: list[str] = []

    def answer(self) -> dict[str, Any]:
        """The next answer; ProcessLost or DeadlineExceeded when there is none."""
        try:
            answer = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            raise DeadlineExceeded(
                f"the probe process {self._process.pid} said nothing for {self._seconds:g} s"
            ) from None
        if not answer:
            raise ProcessLost(
                f"the probe process {self._process.pid} ended with {self._process.wait(5)}",
                remedy="see its output above",
            )
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
            elif match := _PROTOCOL.search(line):
                self.protocols.append(f"{match[1]} over {match[2]}")
        self._answers.put({})


def main(argument: str) -> None:
    from nereus_common.transport.settings import UcxSettings
    from nereus_common.transport.ucx import UcxTransport

    role = Role(**json.loads(argument))
    transport = UcxTransport(UcxSettings(**role.settings))
    address = bytes.fromhex(role.address) or transport.address
    rows = role.bytes // (_COLUMNS * 2)
    if not role.address:
        words = np.arange(rows * _COLUMNS // 4, dtype=np.uint64).view(np.uint16).reshape(rows, _COLUMNS)
        transport.publish(_HOLDER, 1, {_TENSOR: [(Box.whole(words.shape), words)]})
        _say(address=transport.address.hex())
    box = Box((0, int(role.strided)), (rows, _COLUMNS))
    if role.address or role.both:
        landing = np.ones(rows * _COLUMNS if role.land else 0, np.uint16).reshape(-1, _COLUMNS)

        def sink(tensor: TensorName, box: Box, raw: Raw) -> None:
            if role.land:
                landing[box.slices] = raw.view(np.uint16).reshape(box.shape)

        for _ in range(role.repeat):
            request = PullRequest(1, (PullItem(_TENSOR, box, _HOLDER, address),), 2, role.seconds, "probe")
            busy = time.process_time()
            report = transport.pull(request, sink)
            _say(bytes=report.moved_bytes, seconds=report.seconds, cpu_seconds=time.process_time() - busy)
    sys.stdin.read()
    transport.close()


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
