"""The receiving half against scripted movers: what no real transport does on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from nereus_common.core.errors import DeadlineExceeded, Unavailable
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.transport.base import PullItem, PullRequest, Raw
from nereus_common.transport.chunking import digest_staged
from nereus_common.transport.collect import Arrived, Finished, Mailbox, Order, collect

pytestmark = pytest.mark.fast

ITEM = PullItem(TensorName("w"), Box((0,), (64,)), RankRef("source", 0), b"")


class Scripted:
    """Runs `script(order, mailbox)` on a thread; counts cancellations."""

    def __init__(self, script: Callable[[Order, Mailbox], None]) -> None:
        self._script = script
        self.cancelled = 0
        self.released: list[int] = []

    def start(self, order: Order, mailbox: Mailbox) -> Scripted:
        threading.Thread(target=self._script, args=(order, mailbox)).start()
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def chunk(self, order: Order, number: int) -> Arrived:
        data = np.full(order.assignment.chunks[number].nbytes, number, np.uint8)
        digest = digest_staged(order.assignment.chunks[number], data, 1)
        return Arrived(order.assignment, number, data, digest, lambda: self.released.append(number))


def request(deadline: float = 5.0) -> PullRequest:
    return PullRequest(1, (ITEM,), 1, deadline, "t")


def test_a_source_that_ends_early_is_not_taken_for_done() -> None:
    def script(order: Order, mailbox: Mailbox) -> None:
        mailbox.put(mover.chunk(order, 0))
        mailbox.put(Finished(order.assignment))

    mover = Scripted(script)
    with pytest.raises(Unavailable, match=r"source#0 .* 3 of 4 chunks missing"):
        collect(request(), lambda *piece: None, mover, 16)
    assert mover.released == [0]


def test_a_mover_that_says_nothing_ends_the_pull_at_its_deadline_and_is_cancelled() -> None:
    mover = Scripted(lambda order, mailbox: None)
    with pytest.raises(DeadlineExceeded, match=r"transition t: waited 0\.05 s for version 1 from source#0"):
        collect(request(0.05), lambda *piece: None, mover, 16)
    assert mover.cancelled == 1


def test_what_arrives_after_the_end_is_released_unread() -> None:
    late = threading.Event()
    boxes: list[tuple[Order, Mailbox]] = []

    def script(order: Order, mailbox: Mailbox) -> None:
        boxes.append((order, mailbox))
        late.set()

    mover = Scripted(script)
    with pytest.raises(DeadlineExceeded):
        collect(request(0.05), lambda *piece: None, mover, 16)
    assert late.wait(5)
    order, mailbox = boxes[0]
    mailbox.put(mover.chunk(order, 2))
    assert mover.released == [2]


def test_the_sink_is_called_on_the_thread_that_pulls_and_buffers_come_back_after_it() -> None:
    def script(order: Order, mailbox: Mailbox) -> None:
        for number in (2, 0, 3, 1):
            mailbox.put(mover.chunk(order, number))
        mailbox.put(Finished(order.assignment))

    mover = Scripted(script)
    calls: list[tuple[threading.Thread, int, int]] = []

    def sink(tensor: TensorName, box: Box, raw: Raw) -> None:
        assert len(mover.released) == len(calls)
        calls.append((threading.current_thread(), box.start[0] // 16, int(raw[0])))

    report = collect(request(), sink, mover, 16)
    assert calls == [(threading.current_thread(), number, number) for number in (2, 0, 3, 1)]
    assert (report.moved_bytes, report.pieces, mover.released) == (64, 4, [2, 0, 3, 1])
