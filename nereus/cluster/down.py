"""Ending a cluster: every process in order, then proof that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nereus.cluster.spawn import terminate
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus_common.core.errors import ResourceExhausted
from nereus_common.workers import processes
from nereus_common.workers.processes import Identity, Segment

REGISTRY = "registry"
ORDER = ("controller", "coordinator", "generation", "inference", "training")
"""Who stops first: whoever would miss the others."""

_SWEEP_SECONDS = 10.0
"""What the services' own reapers may take after their service ended."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """What it took. `killed`: services that did not stop in time; `swept`: processes and segments left by others."""

    stopped: tuple[str, ...]
    killed: tuple[str, ...]
    swept_processes: int
    swept_segments: int


@dataclass
class Remains:
    """Every process and segment of the cluster that was ever seen."""

    mark: str
    members: set[Identity] = field(default_factory=set)
    segments: set[Segment] = field(default_factory=set)

    def look(self, roots: list[Identity]) -> set[Identity]:
        """Look again; return who is alive."""
        table = processes.snapshot()
        self.members |= processes.marked(self.mark, table)
        for root in roots:
            self.members |= processes.family(root, (), table)
        alive = processes.alive(self.members, table)
        for one in alive:
            self.segments |= processes.segments(one.pid)
        return alive

    def existing_segments(self) -> list[Segment]:
        return [one for one in self.segments if Path(one.path).exists() and Path(one.path).stat().st_ino == one.inode]


def down(folder: ClusterFolder, *, grace: float = 30.0, report: Report = lambda text: None) -> Shutdown:
    """Stop everything that `cluster.json` names; NotFound when it names nothing.

    `grace`: seconds for each service before it is killed. ResourceExhausted when something survives even that.
    """
    with folder.locked():
        return stop_all(folder, folder.require(), grace=grace, report=report)


def stop_all(folder: ClusterFolder, state: ClusterState, *, grace: float, report: Report) -> Shutdown:
    """As `down`, for a caller that holds the folder's lock."""
    roots = [member.identity for member in state.members]
    remains = Remains(state.mark)
    remains.look(roots)
    stopped: list[str] = []
    killed: list[str] = []
    for name in ORDER:
        for member in (one for one in state.members if one.name == name):
            report(f"stopping {name}")
            (stopped if terminate(member, grace) else killed).append(name)
            remains.look(roots)
    if state.member(REGISTRY) is not None:
        from nereus_common.registry import embedded

        report("stopping registry")
        if embedded.stop(folder.registry, timeout=grace):
            stopped.append(REGISTRY)
    swept = _sweep(remains)
    folder.forget()
    return Shutdown(tuple(stopped), tuple(killed), *swept)


def _sweep(remains: Remains) -> tuple[int, int]:
    """Wait for the services' own reapers, then remove by hand what they left; how many processes and segments."""
    until = time.monotonic() + _SWEEP_SECONDS
    while (alive := remains.look([])) and time.monotonic() < until:
        time.sleep(0.1)
    for one in alive:
        processes.kill(one)
    until = time.monotonic() + _SWEEP_SECONDS
    while (left := remains.look([])) and time.monotonic() < until:
        time.sleep(0.1)
    segments = remains.existing_segments()
    for segment in segments:
        processes.unlink(segment)
    still = remains.existing_segments()
    if left or still:
        raise ResourceExhausted(
            f"after the cluster was stopped {len(left)} processes and {len(still)} segments are left",
            remedy="end them by hand",
            pids=", ".join(str(one.pid) for one in left),
            segments=", ".join(segment.path for segment in still),
        )
    return len(alive), len(segments)
