"""The coordinator, but that it kills a process the moment it has written a chosen point of a transition.

It runs in place of the real one in a cluster of its own, from whose folder it takes its orders:

    faults/armed.json     {"point": …, "victim": [words of a command line]}; no words: the coordinator itself
    faults/before.json    what the old training units held when the job stood still: {"version": …, "digests": {…}}
    faults/struck.json    {"point": …, "pid": …, "segments": [paths]}, written just before the kill

The strike comes between the write that makes the point durable and whatever is done next. A victim that does not exist
yet dies as soon as it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nereus_coordinator.__main__ as program
from nereus_coordinator.digests import digest_stage
from nereus_coordinator.reach import Reach

from nereus.cluster.spawn import MARK_VARIABLE
from nereus_common.core.ids import JobId, Stage
from nereus_common.registry import Registry, TransitionRecord, open_registry
from nereus_common.rpc.pool import Channels
from nereus_common.rpc.server import run_service
from nereus_common.transitions.lifecycle import TransitionState
from nereus_common.workers import processes
from tests.faults import EVERY, kill, process_of

BUCKET_BYTES = 512 << 10
"""A tiny model moves in a few rounds."""
LEASE_SECONDS = 3.0
DIGEST_SECONDS = 60.0
BEFORE_COMMIT, AFTER_COMMIT, RELEASING = "before commit", "after commit", "releasing"


def points_of(before: TransitionRecord | None, now: TransitionRecord) -> Iterator[str]:
    """The points that the journal's last line has come to."""
    if before is None or before.state is not now.state:
        yield str(now.state)
    for node, state in enumerate(now.nodes):
        if before is None or before.nodes[node : node + 1] != (state,):
            yield f"node {node} {state}"
    for node, rounds in now.rounds.items():
        if before is None or before.rounds.get(node) != rounds:
            yield f"node {node} round {rounds}"


class StrikingRegistry:
    """A registry whose writers may be struck after they have written."""

    def __init__(self, registry: Registry, faults: Path) -> None:
        self._registry = registry
        self._faults = faults
        self._last: TransitionRecord | None = None
        self._waiting: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    async def __aenter__(self) -> Self:
        await self._registry.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._registry.__aexit__(kind, error, trace)

    async def put_transition(self, record: TransitionRecord, **given: Any) -> int:
        revision = await self._registry.put_transition(record, **given)
        before = self._last if self._last is not None and self._last.id == record.id else None
        self._last = record
        for point in points_of(before, record):
            if point == TransitionState.MOVING:
                await self._note_digests(record)
            self._reached(point)
        return revision

    async def commit_plan(self, *given: Any, **named: Any) -> int:
        self._reached(BEFORE_COMMIT)
        epoch = await self._registry.commit_plan(*given, **named)
        self._reached(AFTER_COMMIT)
        return epoch

    async def remove_unit(self, *given: Any, **named: Any) -> None:
        await self._registry.remove_unit(*given, **named)
        if self._last is not None and self._last.state is TransitionState.COMMITTED:
            self._reached(RELEASING)

    def _reached(self, point: str) -> None:
        armed = self._faults / "armed.json"
        if not armed.exists() or (fault := json.loads(armed.read_text()))["point"] != point:
            return
        armed.unlink()
        try:
            self._strike(point, fault["victim"])
        except LookupError:
            self._waiting = asyncio.create_task(self._strike_soon(point, fault["victim"]))

    def _strike(self, point: str, words: list[str]) -> None:
        pid = process_of(os.environ[MARK_VARIABLE], *words)() if words else os.getpid()
        segments = [segment.path for segment in processes.segments(pid)]
        _write(self._faults / "struck.json", {"point": point, "pid": pid, "segments": segments})
        kill(pid)

    async def _strike_soon(self, point: str, words: list[str]) -> None:
        while True:
            await asyncio.sleep(EVERY)
            try:
                return self._strike(point, words)
            except LookupError:
                continue

    async def _note_digests(self, record: TransitionRecord) -> None:
        async with Channels() as channels:
            reach = Reach(self._registry, channels)
            targets = await reach.stage_services()
            units = [stored.value for stored in await self._registry.units(JobId(record.job))]
            trained = [one for one in units if one.model_stage.stage is Stage.TRAINING and one.id not in record.units]
            version, digests = await digest_stage([reach.unit(one, targets) for one in trained], DIGEST_SECONDS)
        found = {kind: f"{value:016x}" for kind, value in digests.items()}
        _write(self._faults / "before.json", {"version": version, "digests": found})


def _write(path: Path, data: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(data))
    path.with_suffix(".new").rename(path)


async def _open(url: str) -> StrikingRegistry:
    (config,) = [Path(word) for word in sys.argv if word.endswith(".yaml")]
    faults = config.parent.parent / "faults"
    faults.mkdir(exist_ok=True)
    return StrikingRegistry(await open_registry(url), faults)


def main() -> int:
    program.open_registry = _open  # type: ignore[assignment]
    program.membership = partial(program.membership, ttl=LEASE_SECONDS)  # type: ignore[assignment]
    program.Transitions = partial(program.Transitions, bucket_bytes=BUCKET_BYTES)  # type: ignore[misc,assignment]
    return run_service("coordinator", program.serve)


if __name__ == "__main__":
    sys.exit(main())
