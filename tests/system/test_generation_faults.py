"""However a vLLM unit ends, nothing of it stays: no process, no shared memory, no scratch folder of a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from nereus_common.core.errors import ProcessLost
from nereus_common.engines.generation.base import GenerationRequest, Sampling
from nereus_common.engines.generation.scratch import PREFIX
from nereus_common.transport import Transport
from tests.system.generation_units import PROMPT, Reference, Unit, plan
from tests.tiny_models import save_tiny_model

END_SECONDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _scratch() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(PREFIX)}


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_host_killed_while_it_serves_leaves_no_process_and_no_segment(
    folder: Path, source: Transport, tmp_path: Path
) -> None:
    before = _segments()
    unit = await Unit.start(folder, tmp_path, source, stage=plan(tp=2))
    try:
        reference = Reference.load(folder, "float32")
        await unit.sync(reference)
        assert [name for name in _segments() - before if name.startswith(("psm_", "vllm"))] == []
        running = asyncio.create_task(unit.pieces(GenerationRequest("cut", PROMPT, Sampling(180))))
        await asyncio.sleep(0.2)
        family = _family(unit.worker.pid)
        assert len(family) >= 4  # host, EngineCore, two ranks
        os.kill(unit.worker.pid, signal.SIGKILL)
        with pytest.raises(ProcessLost, match="SIGKILL"):
            await running
        _assert_gone(family)
    finally:
        await unit.worker.stop()
    assert _segments() - before == set()


@pytest.mark.parametrize("killed", ["EngineCore", pytest.param("Worker", marks=pytest.mark.long)])
async def test_a_killed_engine_process_ends_the_unit_with_its_name_in_the_log(
    killed: str, folder: Path, source: Transport, tmp_path: Path
) -> None:
    before, scratch = _segments(), _scratch()
    unit = await Unit.start(folder, tmp_path, source, stage=plan())
    try:
        pid = (await unit.call("stats"))[f"pid.{killed}"]
        family = _family(unit.worker.pid)
        os.kill(pid, signal.SIGKILL)
        lost = await asyncio.wait_for(unit.worker.exited, END_SECONDS)
        last = lost.details["log"].splitlines()[-1]
        assert f"{killed} (pid {pid})" in last
        assert "ended unasked" in last
        _assert_gone(family)
    finally:
        await unit.worker.stop()
    assert _segments() - before == set()
    assert _scratch() - scratch == set()


@pytest.mark.long
async def test_a_unit_that_is_stopped_ends_soon_and_leaves_nothing(
    folder: Path, source: Transport, tmp_path: Path
) -> None:
    before, scratch = _segments(), _scratch()
    unit = await Unit.start(folder, tmp_path, source, stage=plan())
    family = _family(unit.worker.pid)
    began = time.monotonic()
    await unit.worker.stop(grace=20)
    assert time.monotonic() - began < 20
    _assert_gone(family)
    assert _segments() - before == set()
    assert _scratch() - scratch == set()
