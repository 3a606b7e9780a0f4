"""Kill -9 at a chosen point of a transition: the point is a predicate over what the registry has of it.

Where the coordinator runs in the test's own process, `FaultyRegistry` strikes between the write that makes the point
durable and whatever is done next: the same instant every time. Over a registry on a server `strike` looks at it every
few milliseconds, and says so when the point had passed before it looked; events are all kept, so `strike_at_event`
misses none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nereus_common.core.ids import JobId
from nereus_common.registry import JobEvent, Registry, TransitionRecord
from nereus_common.registry.memory import MemoryRegistry
from nereus_common.transitions.lifecycle import NodeState, TransitionState
from nereus_common.workers import processes

Point = Callable[[TransitionRecord], bool]
Victim = Callable[[], int]
"""Gives the pid when the point is reached; before that the process may not exist."""

EVERY = 0.005
"""Seconds between two looks at a registry."""
DEATH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Struck:
    """`pid` died when the transition's record was `record`."""

    record: TransitionRecord
    pid: int


def in_state(state: TransitionState) -> Point:
    return lambda record: record.state is state


def node_is(node: int, state: NodeState) -> Point:
    return lambda record: node < len(record.nodes) and record.nodes[node] is state


def rounds_noted(node: int, count: int) -> Point:
    """Exactly `count` rounds of an in-place move are durable, and the node is not done."""
    return lambda record: record.rounds.get(node, 0) == count and not node_is(node, NodeState.DONE)(record)


def process_of(mark: str, *words: str) -> Victim:
    """The process of a cluster (by its mark) whose command line has all of `words`: a service's module, say, or a
    worker's name, `UNIT.RANK`. LookupError where not exactly one does."""

    def find() -> int:
        alive = [one.pid for one in processes.marked(mark, processes.snapshot())]
        found = [pid for pid in alive if all(word in _command(pid) for word in words)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} processes of {mark} have {' and '.join(words)} in their command: {found}")
        return found[0]

    return find


def kill(pid: int) -> None:
    """SIGKILL, and wait until the kernel has ended it; whoever started it may still have to reap it."""
    before = processes.read(pid)
    assert before is not None and before.alive, f"process {pid} was dead before it was killed"
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + DEATH_SECONDS
    while (now := processes.read(pid)) is not None and now.alive and now.identity == before.identity:
        assert time.monotonic() < until, f"process {pid} survives SIGKILL"
        time.sleep(0.001)


async def strike(registry: Registry, job: JobId, at: Point, victim: Victim, *, timeout: float) -> Struck:
    """Kill when the newest transition of `job` is `at` its point. AssertionError when it ended without, or never
    came there within `timeout` seconds."""
    until = time.monotonic() + timeout
    seen: TransitionRecord | None = None
    while time.monotonic() < until:
        known = await registry.transitions(job)
        seen = known[-1].value if known else None
        if seen is not None and at(seen):
            kill(pid := victim())
            return Struck(seen, pid)
        assert seen is None or not seen.state.ended, f"the point had passed, or never came: {_where(seen)}"
        await asyncio.sleep(EVERY)
    raise AssertionError(f"the point did not come within {timeout:g} s: {_where(seen)}")


async def strike_at_event(
    registry: Registry, job: JobId, at: Callable[[JobEvent], bool], victim: Victim, *, timeout: float, after: int = 0
) -> JobEvent:
    """Kill when an event of `job` after revision `after` is `at` the point; AssertionError as `strike`."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        for event in await registry.read_events(job, after, wait=left):
            if at(event):
                kill(victim())
                return event
            after = event.revision
    raise AssertionError(f"no such event of job {job} within {timeout:g} s; the last one has revision {after}")


@dataclass
class Fault:
    """One kill. `struck` once it has happened; it happens once."""

    at: Point
    victim: Victim
    struck: Struck | None = field(default=None, init=False)


class FaultyRegistry(MemoryRegistry):
    """The registry in memory, that kills after it has recorded a point of `faults` and before its writer goes on."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__()
        self.faults = faults

    async def put_transition(self, record: TransitionRecord, *, expected: int, fence: int | None = None) -> int:
        revision = await super().put_transition(record, expected=expected, fence=fence)
        for fault in self.faults:
            if fault.struck is None and fault.at(record):
                kill(pid := fault.victim())
                fault.struck = Struck(record, pid)
        return revision


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _where(record: TransitionRecord | None) -> str:
    if record is None:
        return "the job has no transition"
    nodes = ", ".join(record.nodes)
    return f"transition {record.id} is {record.state}, its nodes [{nodes}], rounds {dict(record.rounds)}"
