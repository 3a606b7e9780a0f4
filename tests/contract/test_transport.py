"""The laws of a transport, on the in-memory twin and on UCX over shared memory and TCP."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nereus_common.core.errors import NotFound, StaleVersion, Unavailable, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.state.digest import digest_box
from nereus_common.transport import loopback, serving
from nereus_common.transport.base import Holder, PullItem, PullReport, PullRequest, Raw, Transport
from nereus_common.transport.chunking import payload
from nereus_common.transport.loopback import LoopbackTransport
from nereus_common.transport.settings import UcxSettings
from nereus_common.transport.ucx import UcxTransport

SMALL, LARGE = 4096, 256 << 10
"""Chunk sizes: many chunks from little data; and messages that wait for their receiver."""
NAME = TensorName("w")
A, B = RankRef("source", 0), RankRef("source", 1)

Make = Callable[..., Transport]


def _network(chunk_bytes: int) -> UcxTransport:
    return UcxTransport(UcxSettings(host="127.0.0.1", chunk_bytes=chunk_bytes, node=f"other-{secrets.token_hex(4)}"))


KINDS: dict[str, Callable[[int], Transport]] = {
    "loopback": lambda chunk_bytes: LoopbackTransport(chunk_bytes=chunk_bytes),
    "ucx-node": lambda chunk_bytes: UcxTransport(UcxSettings(chunk_bytes=chunk_bytes)),
    "ucx-network": _network,
}


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Transport] = []

    def one(chunk_bytes: int = LARGE) -> Transport:
        made.append(KINDS[request.param](chunk_bytes))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@pytest.fixture(scope="module")
def source(make: Make) -> Transport:
    return make()


@pytest.fixture(scope="module")
def puller(make: Make) -> Transport:
    return make(SMALL)


@pytest.fixture(scope="module")
def wide(make: Make) -> Transport:
    return make(LARGE)


_versions = itertools.count(1)


@pytest.fixture
def version() -> int:
    """No two tests share a version."""
    return next(_versions)


def weights(rows: int = 96, columns: int = 64, *, seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 0x7F00, (rows, columns)).astype(np.uint16)


def wanted(
    at: Transport, version: int, box: Box, *, holder: RankRef = A, deadline: float = 20.0, **more: Any
) -> PullRequest:
    item = PullItem(NAME, box, holder, at.address, alternatives=more.pop("alternatives", ()))
    return PullRequest(version, (item,), more.pop("item_bytes", 2), deadline, "transition-7", **more)


class Into:
    """A sink that writes pieces into an array which holds `box`; counts every element."""

    def __init__(self, box: Box, dtype: Any = np.uint16) -> None:
        self.box = box
        self.array = np.zeros(box.shape, dtype)
        self.times = np.zeros(box.shape, np.int64)

    def __call__(self, tensor: TensorName, box: Box, raw: Raw) -> None:
        at = box.relative_to(self.box).slices or ...
        self.array[at] = raw.view(self.array.dtype).reshape(box.shape)
        self.times[at] += 1


def pull(transport: Transport, request: PullRequest) -> tuple[NDArray[Any], PullReport]:
    sink = Into(request.items[0].box)
    report = transport.pull(request, sink)
    assert (sink.times == 1).all()
    return sink.array, report


@st.composite
def published(draw: st.DrawFn) -> tuple[NDArray[Any], Box, Box]:
    """(array, the box it holds, a box within), with any strides and item size."""
    dims = draw(st.integers(0, 3))
    start = tuple(draw(st.integers(0, 9)) for _ in range(dims))
    shape = tuple(draw(st.integers(0, 40)) for _ in range(dims))
    steps = tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(dims))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32, np.float64]))
    bits = np.random.default_rng(draw(st.integers(0, 99))).bytes(int(np.prod(shape) * np.prod(steps)) * 8)
    whole = np.frombuffer(bits, dtype, int(np.prod(shape) * np.prod(steps)))
    array = whole.reshape([size * step for size, step in zip(shape, steps, strict=True)])
    array = array[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()):
        array, shape = array.T, shape[::-1]
    inner = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    return (
        array,
        box,
        Box(
            tuple(a + low for a, (low, _) in zip(start, inner, strict=True)),
            tuple(a + high for a, (_, high) in zip(start, inner, strict=True)),
        ),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=published())
def test_every_box_arrives_bit_for_bit_and_once(
    source: Transport, puller: Transport, case: tuple[NDArray[Any], Box, Box]
) -> None:
    array, outer, box = case
    version = next(_versions)
    source.publish(A, version, {NAME: [(outer, array)]})
    sink = Into(box, array.dtype)
    report = puller.pull(wanted(source, version, box, item_bytes=array.dtype.itemsize), sink)
    expected = np.ascontiguousarray(array[box.relative_to(outer).slices or ...])
    assert sink.array.tobytes() == expected.tobytes()
    assert (sink.times == 1).all()
    assert report.moved_bytes == expected.nbytes


def test_a_report_counts_bytes_and_tells_the_digest_of_the_content(
    source: Transport, puller: Transport, version: int
) -> None:
    array, box = weights(), Box((10, 5), (90, 60))
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    _, report = pull(puller, wanted(source, version, box))
    assert report.moved_bytes == box.elements * 2
    assert report.digest == digest_box(NAME, array.shape, box, array[box.slices])


def test_one_pull_gathers_boxes_of_several_ranks_and_transports(make: Make, puller: Transport, version: int) -> None:
    array = weights(200, 50)
    sources = [make() for _ in range(3)]
    items = []
    for number, box in enumerate([Box((0, 0), (70, 50)), Box((70, 0), (200, 20)), Box((70, 20), (200, 50))]):
        holder = RankRef("spread", number)
        sources[number].publish(holder, version, {NAME: [(box, array[box.slices])]})
        items.append(PullItem(NAME, box, holder, sources[number].address))
    sink = Into(Box.whole(array.shape))
    puller.pull(PullRequest(version, tuple(items), 2, 20.0, "gather"), sink)
    assert (sink.array == array).all() and (sink.times == 1).all()


def test_several_pullers_at_once_receive_the_same(make: Make, source: Transport, version: int) -> None:
    array = weights(300, 64)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    pullers = [make() for _ in range(2)] * 3
    with ThreadPoolExecutor(len(pullers)) as pool:
        results = list(pool.map(lambda one: pull(one, wanted(source, version, Box.whole(array.shape)))[0], pullers))
    assert all((result == array).all() for result in results)


def test_a_version_that_is_not_held_is_stale_and_named(source: Transport, puller: Transport, version: int) -> None:
    array = weights(4, 4)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    for other in (version - 1, version + 1_000_000):
        with pytest.raises(
            StaleVersion, match=rf"source#0 does not offer version {other}; it offers version {version}"
        ):
            pull(puller, wanted(source, other, Box.whole(array.shape)))


def test_a_newer_version_replaces_the_older(source: Transport, puller: Transport, version: int) -> None:
    old, new = weights(seed=1), weights(seed=2)
    newer = next(_versions)
    source.publish(A, version, {NAME: [(Box.whole(old.shape), old)]})
    source.publish(A, newer, {NAME: [(Box.whole(new.shape), new)]})
    assert (pull(puller, wanted(source, newer, Box.whole(new.shape)))[0] == new).all()
    with pytest.raises(StaleVersion):
        pull(puller, wanted(source, version, Box.whole(old.shape)))


def test_a_box_that_the_source_lacks_is_not_found(source: Transport, puller: Transport, version: int) -> None:
    array = weights(8, 8)
    source.publish(A, version, {NAME: [(Box((8, 0), (16, 8)), array)]})
    with pytest.raises(NotFound, match=r"source#0 does not hold w\[0:16,0:8\]"):
        pull(puller, wanted(source, version, Box((0, 0), (16, 8))))


def test_a_source_that_is_gone_is_named_with_the_transition(make: Make, puller: Transport, version: int) -> None:
    gone = make()
    gone.close()
    with pytest.raises(Unavailable, match="transition transition-7: source#0 cannot serve"):
        pull(puller, wanted(gone, version, Box((0,), (4,))))


class Gate(Into):
    """Stops at the first piece until opened."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, tensor: TensorName, box: Box, raw: Raw) -> None:
        self.reached.set()
        assert self.open.wait(20)
        super().__call__(tensor, box, raw)


def test_retire_waits_for_a_running_pull(source: Transport, wide: Transport, version: int) -> None:
    array = weights(40_000, 64)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    gate = Gate(Box.whole(array.shape))
    with ThreadPoolExecutor(2) as pool:
        pulling = pool.submit(wide.pull, wanted(source, version, gate.box), gate)
        assert gate.reached.wait(10)
        retiring = pool.submit(source.retire, version + 1, timeout=20.0)
        time.sleep(0.1)
        assert not retiring.done()
        gate.open.set()
        pulling.result(20)
        retiring.result(20)
    assert (gate.array == array).all()
    with pytest.raises(StaleVersion):
        pull(wide, wanted(source, version, gate.box))


def test_a_pull_that_outlasts_retire_is_revoked_and_sees_no_later_write(
    source: Transport, wide: Transport, version: int
) -> None:
    array = weights(40_000, 64)
    before = array.copy()
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    gate = Gate(Box.whole(array.shape))
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(wide.pull, wanted(source, version, gate.box), gate)
        assert gate.reached.wait(10)
        began = time.monotonic()
        source.retire(version + 1, timeout=0.2)
        assert time.monotonic() - began < 5
        array[:] = 0x1111
        gate.open.set()
        with pytest.raises((StaleVersion, VerificationFailed)):
            pulling.result(20)
    assert ((gate.array == before) | (gate.times == 0)).all()


def test_what_is_taken_back_may_be_freed_only_once_nobody_reads_it(
    source: Transport, wide: Transport, version: int
) -> None:
    array, other = weights(40_000, 64), weights(4, 4)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    source.publish(B, version, {NAME: [(Box.whole(other.shape), other)]})
    gate = Gate(Box.whole(array.shape))
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(wide.pull, wanted(source, version, gate.box), gate)
        assert gate.reached.wait(10)
        assert not source.withdraw(A, timeout=0.1)
        gate.open.set()
        with pytest.raises(StaleVersion):
            pulling.result(20)
    assert source.withdraw(A, timeout=10.0)
    with pytest.raises(StaleVersion):
        pull(wide, wanted(source, version, gate.box))
    assert source.withdraw(A, timeout=0.0), "nothing is offered: nothing is read"
    kept = PullItem(NAME, Box.whole(other.shape), B, source.address)
    found = Into(kept.box)
    wide.pull(replace(wanted(source, version, kept.box), items=(kept,)), found)
    assert (found.array == other).all(), "other holders stay"


def announce_wrong_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> tuple[Raw, int]:
        data, digest = payload(*args, **kwargs)
        return data, digest ^ (1 << 63)

    for module in (serving, loopback):
        monkeypatch.setattr(module, "payload", wrong)


def test_what_is_not_what_was_sent_never_reaches_the_sink(
    source: Transport, puller: Transport, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = weights(300, 64)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    announce_wrong_digests(monkeypatch)
    sink = Into(Box.whole(array.shape))
    with pytest.raises(VerificationFailed, match="from source#0 is not what was sent"):
        puller.pull(wanted(source, version, sink.box), sink)
    assert not sink.times.any()


def test_a_caller_that_compares_the_whole_gets_everything_as_it_is(
    source: Transport, puller: Transport, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = weights(300, 64)
    array[3, 3] = 0x7FC0
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    announce_wrong_digests(monkeypatch)
    request = wanted(source, version, Box.whole(array.shape), wire_dtype="bfloat16", checked=False)
    found, report = pull(puller, request)
    assert (found == array).all()
    assert (report.moved_bytes, report.digest) == (array.nbytes, 0)


def test_values_that_are_not_finite_are_refused(source: Transport, puller: Transport, version: int) -> None:
    array = weights(8, 8)
    array[3, 3] = 0x7FC0
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    with pytest.raises(VerificationFailed, match="not finite"):
        pull(puller, wanted(source, version, Box.whole(array.shape), wire_dtype="bfloat16"))
    assert (pull(puller, wanted(source, version, Box.whole(array.shape)))[0] == array).all()


def test_what_one_holder_cannot_give_is_fetched_from_another(make: Make, puller: Transport, version: int) -> None:
    array = weights(300, 64)
    gone, stale, good = make(), make(), make()
    stale.publish(B, version + 1_000_000, {NAME: [(Box.whole(array.shape), array)]})
    good.publish(B, version, {NAME: [(Box.whole(array.shape), array)]})
    gone.close()
    spares = (Holder(B, stale.address), Holder(B, good.address))
    result, report = pull(puller, wanted(gone, version, Box.whole(array.shape), alternatives=spares))
    assert (result == array).all()
    assert report.failed == (A, B) and report.moved_bytes == array.nbytes


def test_an_error_of_the_sink_passes_through_and_the_next_pull_works(
    source: Transport, wide: Transport, version: int
) -> None:
    array = weights(20_000, 64)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})

    def full(tensor: TensorName, box: Box, raw: Raw) -> None:
        raise MemoryError("no room")

    for _ in range(3):
        with pytest.raises(MemoryError, match="no room"):
            wide.pull(wanted(source, version, Box.whole(array.shape)), full)
    assert (pull(wide, wanted(source, version, Box.whole(array.shape)))[0] == array).all()


def test_after_an_aborted_pull_no_old_byte_arrives(source: Transport, wide: Transport, version: int) -> None:
    old, new, newer = weights(20_000, 64, seed=3), weights(20_000, 64, seed=4), next(_versions)
    source.publish(A, version, {NAME: [(Box.whole(old.shape), old)]})

    def abort(tensor: TensorName, box: Box, raw: Raw) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        wide.pull(wanted(source, version, Box.whole(old.shape)), abort)
    source.publish(A, newer, {NAME: [(Box.whole(new.shape), new)]})
    assert (pull(wide, wanted(source, newer, Box.whole(new.shape)))[0] == new).all()


async def test_an_async_pull_leaves_the_event_loop_free(source: Transport, wide: Transport, version: int) -> None:
    array = weights(20_000, 64)
    source.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    gate = Gate(Box.whole(array.shape))
    pulling = asyncio.create_task(wide.async_pull(wanted(source, version, gate.box), gate))
    assert await asyncio.to_thread(gate.reached.wait, 20)
    gate.open.set()
    await pulling
    assert (gate.array == array).all()


def test_closing_twice_is_closing_and_leaves_no_thread(make: Make, puller: Transport, version: int) -> None:
    before = set(threading.enumerate())
    transport = make()
    array = weights(8, 8)
    transport.publish(A, version, {NAME: [(Box.whole(array.shape), array)]})
    pull(puller, wanted(transport, version, Box.whole(array.shape)))
    transport.close()
    transport.close()
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name.startswith("nereus") and thread.is_alive()]
