"""A process that holds a known pattern and serves it; commands come as JSON lines on stdin. Run as a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef

NAME = TensorName("model.layers.0.mlp.up_proj.weight")
SHAPE = (4096, 2048)
CHUNK = 1 << 20
HOLDER = RankRef("actor.training.r0", 0)


def pattern(seed: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.uint16]:
    """Finite bfloat16 bits that differ between seeds at every element."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint32)
    return (((index * 40503 >> 3) + seed * 911) % 0x7F00).astype(np.uint16).reshape(shape)


@dataclass
class Source:
    """The parent's handle of such a process."""

    process: subprocess.Popen[str]
    address: bytes

    @classmethod
    def spawn(cls, **settings: Any) -> Source:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.transport_source", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        source = cls(process, b"")
        source.address = bytes.fromhex(source.reply())
        return source

    @property
    def pid(self) -> int:
        return self.process.pid

    def reply(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the source ended with {self.process.poll()}"
        return line

    def tell(self, command: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **fields}) + "\n")
        self.process.stdin.flush()

    def ask(self, command: str, **fields: Any) -> str:
        self.tell(command, **fields)
        return self.reply()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def main() -> None:
    from nereus_common.transport.settings import UcxSettings
    from nereus_common.transport.ucx import UcxTransport

    transport = UcxTransport(UcxSettings(**json.loads(sys.argv[1])))
    print(transport.address.hex(), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "publish":
                held = pattern(command["seed"])
                transport.publish(HOLDER, command["version"], {NAME: [(Box.whole(SHAPE), held)]})
            case "retire":
                began = time.monotonic()
                transport.retire(command["below"], timeout=command["timeout"])
                print(time.monotonic() - began, flush=True)
                continue
            case "compute":
                print("computing", flush=True)
                compute(command["seconds"])
            case "close":
                transport.close()
        print("done", flush=True)


def compute(seconds: float) -> None:
    """Keep the main thread busy, in long numpy calls and in plain Python."""
    end = time.monotonic() + seconds
    matrix = np.ones((512, 512))
    while time.monotonic() < end:
        matrix = matrix @ matrix
        matrix /= matrix.max()
        sum(range(100_000))


if __name__ == "__main__":
    main()
