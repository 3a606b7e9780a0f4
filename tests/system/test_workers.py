"""Worker processes: calls, streams, errors and deadlines across a real process boundary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import uvloop

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, ProcessLost, StaleVersion
from nereus_common.observe import logs
from nereus_common.workers import Worker, WorkerError, WorkerSpec, processes
from nereus_common.workers.worker import STREAM_WINDOW

BODIES = Path(__file__).parent / "bodies"


PRELOAD: list[str] = []
"""Of the workers of a test: each runs with a process that was executed, and with one that was forked."""


@pytest.fixture(autouse=True, params=["executed", "forked"])
def _bodies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BODIES))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(globals(), "PRELOAD", ["worker_bodies"] if request.param == "forked" else [])


def desk(folder: Path, body: str = "worker_bodies:Desk", env: Mapping[str, str] | None = None) -> WorkerSpec:
    return WorkerSpec("desk", body, {}, folder / "l", env or {}, tuple(PRELOAD))


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    started = await Worker.start(desk(tmp_path), timeout=60)
    yield started
    await started.stop()


async def test_plain_methods_run_on_the_main_thread_and_async_ones_on_the_io_thread(worker: Worker) -> None:
    assert await worker.call("thread", timeout=10) == "MainThread"
    assert await worker.call("io_thread", timeout=10) == "io"


async def test_async_methods_run_while_a_plain_one_computes(worker: Worker) -> None:
    busy = asyncio.create_task(worker.call("sleep", 2.0, timeout=10))
    before = time.monotonic()
    await asyncio.gather(*(worker.call("sleep_async", 0.2, timeout=10) for _ in range(20)))
    assert time.monotonic() - before < 1.8
    assert not busy.done()
    await busy


async def test_a_hundred_megabytes_pass_unharmed_and_arrive_writable(worker: Worker) -> None:
    array = np.arange(25_000_000, dtype=np.float32)
    doubled = await worker.call("double", array, timeout=60)
    np.testing.assert_array_equal(doubled, array * 2)
    doubled[0] = 7


async def test_small_and_non_contiguous_arrays_pass_too(worker: Worker) -> None:
    value = {"small": np.arange(3), "strided": np.arange(1_000_000).reshape(1000, 1000)[:, ::3]}
    back = await worker.call("echo", value, timeout=30)
    for name, array in value.items():
        np.testing.assert_array_equal(back[name], array)


async def test_our_errors_cross_as_they_are(worker: Worker) -> None:
    with pytest.raises(StaleVersion) as caught:
        await worker.call("refuse", timeout=10)
    assert caught.value.remedy == "ask for 4"
    assert caught.value.details == {"version": "3"}


async def test_other_errors_cross_with_their_traceback(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="desk: stumble raised ZeroDivisionError: no such share") as caught:
        await worker.call("stumble", timeout=10)
    assert "in stumble" in caught.value.details["traceback"]
    assert await worker.call("echo", 1, timeout=10) == 1


async def test_a_result_that_cannot_be_pickled_fails_its_call_only(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="cannot be pickled"):
        await worker.call("unspeakable", timeout=10)
    with pytest.raises(TypeError, match="pickle"):
        await worker.call("echo", asyncio.Lock(), (_ for _ in ()), timeout=10)
    assert await worker.call("echo", 1, timeout=10) == 1


@pytest.mark.parametrize("method", ["absent", "_build"])
async def test_a_method_that_does_not_exist_is_refused_by_name(worker: Worker, method: str) -> None:
    with pytest.raises(InvalidInput, match=method):
        await worker.call(method, timeout=10)


async def test_the_child_logs_what_the_caller_works_for(worker: Worker) -> None:
    with logs.about(job="demo", step=3):
        for method in ("subject", "subject_async"):
            assert await worker.call(method, timeout=10) == {"job": "demo", "step": "3"}
    assert await worker.call("subject", timeout=10) == {}
    assert "desk: asked  job=demo step=3" in worker.spec.log_path.read_text()


async def test_a_late_call_raises_who_and_what_and_later_calls_succeed(worker: Worker) -> None:
    with pytest.raises(DeadlineExceeded, match=r"desk \(pid \d+\) did not finish sleep within 0.2 s"):
        await worker.call("sleep", 1.0, timeout=0.2)
    with pytest.raises(DeadlineExceeded):  # still queued behind it: dropped
        await worker.call("leave", 3, timeout=0.1)
    assert await worker.call("echo", 1, timeout=10) == 1


async def test_a_stream_yields_everything_in_order_and_ends(worker: Worker) -> None:
    assert [item async for item in worker.stream("count", 500, timeout=10)] == list(range(500))
    assert await worker.call("seen", timeout=10) == (500, 1)


async def test_closing_a_stream_cancels_the_generator(worker: Worker) -> None:
    async with contextlib.aclosing(worker.stream("count", 10**9, timeout=10)) as items:
        async for item in items:
            if item == 5:
                break
    async with asyncio.timeout(5):
        while (await worker.call("seen", timeout=5))[1] != 1:
            pass


async def test_a_generator_runs_no_further_ahead_than_the_window(worker: Worker) -> None:
    async with contextlib.aclosing(worker.stream("count", 10**9, timeout=10)) as items:
        await anext(items)
        await asyncio.sleep(0.5)
        produced, _ = await worker.call("seen", timeout=10)
        assert produced <= STREAM_WINDOW + 1


async def test_a_stream_passes_its_error_on_after_its_items(worker: Worker) -> None:
    seen = []
    with pytest.raises(StaleVersion, match="counted out"):
        async for item in worker.stream("count_then_fail", 3, timeout=10):
            seen.append(item)
    assert seen == [0, 1, 2]
    with pytest.raises(InvalidInput, match="no async generator"):
        await anext(worker.stream("echo", 3, timeout=10))


async def test_a_killed_child_fails_every_pending_call_with_the_end_of_its_log(worker: Worker) -> None:
    await worker.call("talk", 50, timeout=10)
    pending = [asyncio.create_task(worker.call(name, 60, timeout=60)) for name in ("sleep", "sleep_async")]
    await asyncio.sleep(0.2)
    os.kill(worker.pid, 9)
    for result in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(result, ProcessLost)
        assert result.details["process"] == "desk"
        assert result.details["exit"] == "was killed by SIGKILL"
        assert result.details["log"].splitlines() == [f"line {number}" for number in range(30, 50)]
    assert isinstance(await asyncio.wait_for(worker.exited, 5), ProcessLost)
    with pytest.raises(ProcessLost):
        await worker.call("echo", 1, timeout=10)


async def test_a_child_killed_while_it_is_being_written_to_is_lost_to_the_writers_too(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)  # it reads no more: the socket fills up
    writing = [asyncio.create_task(worker.call("echo", np.zeros(2_000_000), timeout=60)) for _ in range(3)]
    with pytest.raises(DeadlineExceeded):
        await anext(worker.stream("count", 1, timeout=0.3))
    os.kill(worker.pid, signal.SIGKILL)
    for result in await asyncio.gather(*writing, return_exceptions=True):
        assert isinstance(result, ProcessLost)


async def test_a_child_that_leaves_says_its_status(worker: Worker) -> None:
    stream = worker.stream("count", 10**9, timeout=10)
    await anext(stream)
    with pytest.raises(ProcessLost, match="exited with status 3"):
        await worker.call("leave", 3, timeout=10)
    with pytest.raises(ProcessLost):
        async for _ in stream:
            pass


async def test_stop_closes_the_body_and_leaves_exited_pending(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    pending = asyncio.create_task(worker.call("sleep_async", 60, timeout=60))
    await asyncio.sleep(0.1)
    await worker.stop()
    await worker.stop()
    assert "desk is closed" in (tmp_path / "l").read_text()
    assert not worker.exited.done()
    with pytest.raises(ProcessLost, match="after it was told to stop"):
        await pending


async def test_stop_kills_a_body_that_does_not_listen(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path), timeout=60)
    pending = asyncio.create_task(worker.call("sleep", 60, timeout=60))
    await asyncio.sleep(0.1)
    await worker.stop(grace=0.3)
    assert processes.read(worker.pid) is None
    with pytest.raises(ProcessLost):
        await pending


async def test_a_constructor_that_raises_raises_here_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StaleVersion, match="cannot be built"):
        await Worker.start(desk(tmp_path, body="worker_bodies:Broken"), timeout=60)
    with pytest.raises(WorkerError, match="no_such_module"):
        await Worker.start(desk(tmp_path, body="no_such_module:Body"), timeout=60)
    assert not children_of(os.getpid(), "nereus_common.workers.child")


async def test_a_slow_start_ends_at_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    name = f"slow-{uuid.uuid4().hex}"
    with pytest.raises(DeadlineExceeded, match="its construction within"):
        await Worker.start(replace(desk(tmp_path, body="worker_bodies:Slow"), name=name), timeout=3)
    assert not await asyncio.to_thread(lambda: [pid for pid in processes.snapshot() if name in command_line(pid)])


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    starting = asyncio.create_task(Worker.start(desk(tmp_path, body="worker_bodies:Slow"), timeout=60))
    await asyncio.sleep(1.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not children_of(os.getpid(), "nereus_common.workers.child")


async def test_calls_given_up_in_the_middle_of_a_large_frame_harm_no_other(worker: Worker) -> None:
    array = np.arange(4_000_000)
    given_up = [asyncio.create_task(worker.call("double", array, timeout=30)) for _ in range(6)]
    await asyncio.sleep(0.02)
    for task in given_up[::2]:
        task.cancel()
    for result in (await asyncio.gather(*given_up, return_exceptions=True))[1::2]:
        np.testing.assert_array_equal(result, array * 2)
    assert await worker.call("echo", "still here", timeout=10) == "still here"


async def test_a_log_shared_with_an_earlier_process_tells_only_of_the_last_one(tmp_path: Path) -> None:
    for status in (3, 4):
        worker = await Worker.start(desk(tmp_path), timeout=60)
        with pytest.raises(ProcessLost, match=f"status {status}") as caught:
            await worker.call("leave", status, timeout=10)
        assert len(caught.value.details["log"].splitlines()) == 2
        await worker.stop()


async def test_the_environment_is_added_to_the_services(tmp_path: Path) -> None:
    worker = await Worker.start(desk(tmp_path, env={"NEREUS_TEST": "yes"}), timeout=60)
    assert await worker.call("environment", "NEREUS_TEST", timeout=10) == "yes"
    assert await worker.call("environment", "OMP_NUM_THREADS", timeout=10) == "1"
    await worker.stop()


def test_workers_serve_under_uvloop(tmp_path: Path) -> None:
    async def main() -> None:
        worker = await Worker.start(desk(tmp_path), timeout=60)
        array = np.ones(5_000_000)
        np.testing.assert_array_equal(await worker.call("double", array, timeout=30), array * 2)
        assert [item async for item in worker.stream("count", 100, timeout=10)] == list(range(100))
        os.kill(worker.pid, 9)
        assert isinstance(await asyncio.wait_for(worker.exited, 5), ProcessLost)
        await worker.stop()

    uvloop.run(main())


def is_python(pid: int, *words: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(word in line for word in words)


def children_of(parent: int, *words: str) -> list[int]:
    return [pid for pid, one in processes.snapshot().items() if one.parent == parent and is_python(pid, *words)]


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
