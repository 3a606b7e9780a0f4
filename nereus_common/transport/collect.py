"""The receiving half that every transport shares: verify, deliver, fail over, give up in time.

A mover carries one assignment and reports events into a mailbox; `collect` runs on the thread that called `pull`, so
digests and sinks cost the mover's thread nothing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nereus_common.core.errors import NereusError, VerificationFailed
from nereus_common.state.digest import combine
from nereus_common.transport.base import PullReport, PullRequest, Raw, Sink
from nereus_common.transport.chunking import all_finite, digest_staged, split
from nereus_common.transport.failures import deadline_exceeded, unavailable
from nereus_common.transport.ledger import Assignment, Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A chunk lies in `data`, which is lent until `release` is called. `digest` is the source's; None: not checked."""

    assignment: Assignment
    chunk: int
    data: Raw
    digest: int | None
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """All chunks of the assignment have been reported."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The assignment will report nothing more."""

    assignment: Assignment
    error: NereusError


Event = Arrived | Finished | Failed


class Mailbox:
    """Events on their way from the movers to the puller. What comes after `close` is released unread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, event: Event) -> None:
        with self._lock:
            if not self._closed:
                self._events.put(event)
                return
        _release(event)

    def get(self, timeout: float) -> Event:
        """The next event; queue.Empty after `timeout` seconds."""
        return self._events.get(timeout=max(timeout, 0))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        while not self._events.empty():
            _release(self._events.get_nowait())


@dataclass(frozen=True, slots=True)
class Order:
    """One assignment under way. It ends at `deadline` and is given up after `patience` seconds without progress."""

    assignment: Assignment
    request: PullRequest
    deadline: float
    patience: float


class Running(Protocol):
    def cancel(self) -> object: ...


class Mover(Protocol):
    """Carries assignments; `deadline` is on `time.monotonic`'s clock."""

    def start(self, order: Order, mailbox: Mailbox) -> Running:
        """Begin, without blocking. Ends in Finished or Failed unless cancelled; a cancelled one only releases."""


def collect(request: PullRequest, sink: Sink, mover: Mover, chunk_bytes: int) -> PullReport:
    """Run `request` to its end on the calling thread; see `Transport.pull`."""
    return _Collector(request, sink, mover, chunk_bytes).run()


class _Collector:
    def __init__(self, request: PullRequest, sink: Sink, mover: Mover, chunk_bytes: int) -> None:
        self._request = request
        self._sink = sink
        self._mover = mover
        self._ledger = Ledger(request, chunk_bytes)
        self._mailbox = Mailbox()
        self._running: dict[Assignment, Running] = {}
        self._began = time.monotonic()
        self._deadline = self._began + request.deadline
        self._moved = self._pieces = self._digest = 0

    def run(self) -> PullReport:
        try:
            self._start(self._ledger.start())
            while self._running:
                self._handle(self._next())
        finally:
            for running in self._running.values():
                running.cancel()
            self._mailbox.close()
        seconds = time.monotonic() - self._began
        return PullReport(self._moved, self._pieces, seconds, self._digest, tuple(self._ledger.failed))

    def _start(self, assignments: list[Assignment]) -> None:
        """A holder that has spares is not waited for until the end: it gets its share of the time left."""
        left = max(self._deadline - time.monotonic(), 0.0)
        for assignment in assignments:
            order = Order(assignment, self._request, self._deadline, left / (assignment.spares + 1))
            self._running[assignment] = self._mover.start(order, self._mailbox)

    def _next(self) -> Event:
        try:
            return self._mailbox.get(self._deadline - time.monotonic())
        except queue.Empty:
            sources = sorted(str(assignment.holder.rank) for assignment in self._running)
            raise deadline_exceeded(self._request, ", ".join(sources), self._request.deadline) from None

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived():
                try:
                    self._take(event)
                finally:
                    event.release()
            case Finished(assignment) if assignment.missing:
                self._replace(assignment, self._incomplete(assignment))
            case Finished(assignment):
                self._running.pop(assignment, None)
            case Failed(assignment, error):
                self._replace(assignment, error)

    def _take(self, event: Arrived) -> None:
        """Verify and deliver one chunk. What fails verification is fetched elsewhere; what the sink raises ends all."""
        assignment, chunk = event.assignment, event.assignment.chunks[event.chunk]
        if assignment not in self._running:
            return
        self._moved += chunk.nbytes
        try:
            self._verify(event)
        except VerificationFailed as error:
            self._replace(assignment, error)
            return
        for piece, part in split(chunk, event.data, self._request.item_bytes):
            self._sink(piece.tensor, piece.box, part)
        self._pieces += len(chunk.pieces)
        self._digest = combine((self._digest, event.digest or 0))
        self._ledger.verified(assignment, event.chunk)

    def _replace(self, assignment: Assignment, error: NereusError) -> None:
        running = self._running.pop(assignment, None)
        if running is not None:
            running.cancel()
            self._start(self._ledger.replace(assignment, error))

    def _incomplete(self, assignment: Assignment) -> NereusError:
        lacking = f"it ended with {len(assignment.missing)} of {len(assignment.chunks)} chunks missing"
        return unavailable(self._request, assignment.holder.rank, lacking)

    def _verify(self, event: Arrived) -> None:
        if event.digest is None:
            return
        chunk, source = event.assignment.chunks[event.chunk], event.assignment.holder.rank
        names = ", ".join(f"{piece.tensor}{piece.box}" for piece in chunk.pieces[:3])
        if digest_staged(chunk, event.data, self._request.item_bytes) != event.digest:
            problem = "is not what was sent: the digests differ"
        elif not all_finite(event.data, self._request.wire_dtype):
            problem = "has values that are not finite"
        else:
            return
        request = self._request
        raise VerificationFailed(
            f"transition {request.transition}: {names} of version {request.version} from {source} {problem}",
            remedy="nothing of it was delivered; pull from another holder",
            source=source,
            transition=request.transition,
        )


def _release(event: Event) -> None:
    if isinstance(event, Arrived):
        event.release()
