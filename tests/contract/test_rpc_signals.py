"""A service process ends in order when asked, and at once when asked twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub
from nereus_common.rpc import DeadlineChannel

SCRIPT = Path(__file__).parent / "bodies" / "rpc_service.py"


@contextmanager
def service(port: int = 0, drain_seconds: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    command = [sys.executable, str(SCRIPT), str(port), str(drain_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_calls_under_way_finish(number: signal.Signals) -> None:
    with service() as process:
        async with DeadlineChannel(said(process)) as channel:
            await channel.ready(10)
            call = asyncio.ensure_future(GenerationServiceStub(channel).AbortGeneration(pb.AbortGenerationRequest()))
            await asyncio.sleep(0.3)
            process.send_signal(number)
            assert await call == pb.AbortGenerationResponse()
        assert (said(process), said(process)) == ("draining", "done")
        assert process.wait(10) == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    with service(drain_seconds=60) as process:
        said(process)
        process.terminate()
        assert said(process) == "draining"
        process.terminate()
        assert process.wait(5) == 128 + signal.SIGTERM


async def test_a_taken_port_ends_it_with_one_line_that_says_so() -> None:
    with service() as first:
        port = int(said(first).rpartition(":")[2])
        with service(port) as second:
            assert second.wait(30) == 1
            assert second.stderr is not None
            text = second.stderr.read()
        assert f"port {port} on 127.0.0.1 is taken" in text
        assert "Traceback" not in text
