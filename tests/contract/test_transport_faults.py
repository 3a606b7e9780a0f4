"""What happens to a puller when the processes it pulls from die, hang, compute or restart; over UCX, for real."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nereus_common.core.errors import DeadlineExceeded, NereusError, StaleVersion, Unavailable
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.transport.base import Holder, PullItem, PullReport, PullRequest, Raw
from nereus_common.transport.settings import UcxSettings
from nereus_common.transport.ucx import UcxTransport
from tests.contract.transport_source import CHUNK, HOLDER, NAME, SHAPE, Source, pattern

Spawn = Callable[..., Source]


@pytest.fixture(params=["node", "network"])
def reach(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a source: on this node, or as though it were on another."""
    settings: dict[str, Any] = {"chunk_bytes": CHUNK, "grace": 0.5}
    if request.param == "network":
        settings |= {"host": "127.0.0.1", "node": f"other-{secrets.token_hex(4)}"}
    return settings


@pytest.fixture
def spawn(reach: dict[str, Any]) -> Iterator[Spawn]:
    sources: list[Source] = []

    def one(version: int = 1, seed: int = 1) -> Source:
        sources.append(Source.spawn(**reach))
        sources[-1].ask("publish", version=version, seed=seed)
        return sources[-1]

    yield one
    for source in sources:
        source.end()


@pytest.fixture
def puller() -> Iterator[UcxTransport]:
    transport = UcxTransport(UcxSettings(chunk_bytes=CHUNK, grace=0.5))
    yield transport
    transport.close()


class Recorder:
    """Keeps what arrives; calls `at_piece(number)` before taking each piece."""

    def __init__(self, at_piece: Callable[[int], None] = lambda number: None) -> None:
        self.array = np.zeros(SHAPE, np.uint16)
        self.times = np.zeros(SHAPE, np.uint8)
        self._at_piece = at_piece
        self._count = 0

    def __call__(self, tensor: TensorName, box: Box, raw: Raw) -> None:
        self._at_piece(self._count)
        self._count += 1
        self.array[box.slices] = raw.view(np.uint16).reshape(box.shape)
        self.times[box.slices] += 1

    def holds(self, expected: NDArray[np.uint16]) -> bool:
        return bool((self.times == 1).all() and (self.array == expected).all())


def wanted(source: Source, *spares: Source, version: int = 1, deadline: float = 20.0) -> PullRequest:
    others = tuple(Holder(HOLDER, spare.address) for spare in spares)
    item = PullItem(NAME, Box.whole(SHAPE), HOLDER, source.address, alternatives=others)
    return PullRequest(version, (item,), 2, deadline, "transition-9")


def strike(source: Source, sign: signal.Signals, piece: int = 2) -> Callable[[int], None]:
    return lambda number: os.kill(source.pid, sign) if number == piece else None


def assert_pulls(puller: UcxTransport, source: Source, seed: int, version: int = 1) -> PullReport:
    recorder = Recorder()
    report = puller.pull(wanted(source, version=version), recorder)
    assert recorder.holds(pattern(seed))
    return report


def test_a_source_killed_before_a_pull_is_named_at_once(puller: UcxTransport, spawn: Spawn) -> None:
    dead, other = spawn(), spawn()
    assert_pulls(puller, dead, seed=1)
    os.kill(dead.pid, signal.SIGKILL)
    dead.process.wait(10)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=f"transition transition-9: {HOLDER} cannot serve version 1"):
        puller.pull(wanted(dead), Recorder())
    assert time.monotonic() - began < 5
    assert_pulls(puller, other, seed=1)


def test_a_source_killed_during_a_pull_costs_an_error_and_not_the_receiver(puller: UcxTransport, spawn: Spawn) -> None:
    dying, other = spawn(seed=1), spawn(seed=2)
    recorder = Recorder(strike(dying, signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(Unavailable, match=f"transition transition-9: {HOLDER}"):
        puller.pull(wanted(dying), recorder)
    assert time.monotonic() - began < 10
    assert ((recorder.array == pattern(1)) | (recorder.times == 0)).all()
    for _ in range(3):
        assert_pulls(puller, other, seed=2)


def test_a_pull_goes_on_with_another_holder_when_its_source_is_killed(puller: UcxTransport, spawn: Spawn) -> None:
    dying, other = spawn(), spawn()
    recorder = Recorder(strike(dying, signal.SIGKILL))
    report = puller.pull(wanted(dying, other), recorder)
    assert recorder.holds(pattern(1))
    assert report.failed == (HOLDER,)


def test_a_source_that_hangs_ends_the_pull_at_its_deadline(puller: UcxTransport, spawn: Spawn) -> None:
    hanging = spawn()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"transition-9: waited .* for version 1 from {HOLDER}"):
        puller.pull(wanted(hanging, deadline=1.5), Recorder(strike(hanging, signal.SIGSTOP)))
    assert 1.0 < time.monotonic() - began < 4


def test_a_hanging_source_is_replaced_before_the_deadline(puller: UcxTransport, spawn: Spawn) -> None:
    hanging, other = spawn(), spawn()
    recorder = Recorder(strike(hanging, signal.SIGSTOP))
    puller.pull(wanted(hanging, other, deadline=6.0), recorder)
    assert recorder.holds(pattern(1))


def test_a_source_that_wakes_up_late_writes_into_no_buffer_in_use(puller: UcxTransport, spawn: Spawn) -> None:
    hanging, other = spawn(seed=1), spawn(seed=2)
    with pytest.raises(DeadlineExceeded):
        puller.pull(wanted(hanging, deadline=1.0), Recorder(strike(hanging, signal.SIGSTOP)))
    time.sleep(1.0)
    wake = strike(hanging, signal.SIGCONT)

    def slowly(number: int) -> None:
        wake(number)
        time.sleep(0.03)

    recorder = Recorder(slowly)
    puller.pull(wanted(other), recorder)
    assert recorder.holds(pattern(2))
    for _ in range(3):
        assert_pulls(puller, other, seed=2)


def test_a_source_that_computes_still_serves(puller: UcxTransport, spawn: Spawn) -> None:
    busy = spawn()
    assert busy.ask("compute", seconds=8.0) == "computing"
    began = time.monotonic()
    assert_pulls(puller, busy, seed=1)
    assert time.monotonic() - began < 7


def test_a_source_that_crashed_and_came_back_serves_at_its_new_address(puller: UcxTransport, spawn: Spawn) -> None:
    first = spawn(version=1, seed=1)
    assert_pulls(puller, first, seed=1)
    first.process.kill()
    first.process.wait(10)
    second = spawn(version=2, seed=2)
    with pytest.raises(NereusError):
        puller.pull(wanted(first), Recorder())
    with pytest.raises(StaleVersion):
        puller.pull(wanted(second, version=1), Recorder())
    assert_pulls(puller, second, seed=2, version=2)


def test_a_pull_after_an_aborted_one_receives_no_old_bytes(puller: UcxTransport, spawn: Spawn) -> None:
    source = spawn(version=1, seed=1)

    def abort(number: int) -> None:
        if number == 2:
            raise InterruptedError("enough")

    for version in range(2, 6):
        with pytest.raises(InterruptedError):
            puller.pull(wanted(source, version=version - 1), Recorder(abort))
        source.ask("publish", version=version, seed=version)
        assert_pulls(puller, source, seed=version, version=version)


def test_pulls_aborted_on_living_sources_cost_neither_files_nor_memory(puller: UcxTransport, spawn: Spawn) -> None:
    source = spawn()

    def abort(number: int) -> None:
        raise InterruptedError("enough")

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for _ in range(6):
        with pytest.raises(InterruptedError):
            puller.pull(wanted(source), Recorder(abort))
        assert_pulls(puller, source, seed=1)
        time.sleep(0.2)
        counts.append(open_files())
    assert max(counts[1:]) <= counts[0] + 2
    assert puller.stranded_bytes == 0


def test_a_puller_killed_during_a_pull_frees_the_source(puller: UcxTransport, spawn: Spawn) -> None:
    source = spawn()
    code = (
        "import sys, time\n"
        "from tests.contract.test_transport_faults import *\n"
        "def slowly(number): print('pulling', flush=True); time.sleep(5)\n"
        "source = Source(None, bytes.fromhex(sys.argv[1]))\n"
        "UcxTransport(UcxSettings(chunk_bytes=CHUNK)).pull(wanted(source), Recorder(slowly))\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", code, source.address.hex()],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert victim.stdout is not None and victim.stdout.readline() == "pulling\n"
    victim.kill()
    victim.wait(10)
    victim.stdout.close()
    assert float(source.ask("retire", below=2, timeout=10.0)) < 5
    source.ask("publish", version=2, seed=2)
    assert_pulls(puller, source, seed=2, version=2)


def test_a_pull_that_runs_when_its_own_transport_closes_ends(puller: UcxTransport, spawn: Spawn) -> None:
    source, reached = spawn(), threading.Event()

    def wait(number: int) -> None:
        reached.set()
        time.sleep(0.3)

    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(puller.pull, wanted(source), Recorder(wait))
        assert reached.wait(10)
        puller.close()
        with pytest.raises(Unavailable):
            pulling.result(10)
