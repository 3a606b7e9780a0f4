"""What /proc knows of processes: who is whose child, who maps which shared segment. Linux only, stdlib only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHM = "/dev/shm/"
_GONE = (FileNotFoundError, ProcessLookupError)


class Identity(NamedTuple):
    """A process for good: a pid alone may be another process tomorrow. `start` is in clock ticks since boot."""

    pid: int
    start: int


class Segment(NamedTuple):
    """A file in /dev/shm; the inode tells it from a later one of the same name."""

    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat."""

    identity: Identity
    state: str
    parent: int
    session: int

    @property
    def alive(self) -> bool:
        """False for a zombie: it holds a pid and nothing else."""
        return self.state not in "ZX"


def read(pid: int) -> Process | None:
    """The process that now has `pid`, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except _GONE:
        return None
    # the name, in parentheses, may hold spaces and parentheses itself
    fields = text[text.rindex(")") + 2 :].split()
    return Process(Identity(pid, int(fields[19])), fields[0], int(fields[1]), int(fields[3]))


def identify(pid: int) -> Identity | None:
    process = read(pid)
    return None if process is None else process.identity


def snapshot() -> dict[int, Process]:
    """All processes, by pid."""
    found = (read(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {process.identity.pid: process for process in found if process is not None}


def family(root: Identity, known: Iterable[Identity], processes: Mapping[int, Process]) -> set[Identity]:
    """Everything still in the table that `root` or a process of `known` began, themselves included.

    Found by descent, and by session while one of them still holds the session's number (a number in use is not
    given to strangers). A process that left both earlier is in `known` if anyone looked in time.
    """
    members = {one for one in {root, *known} if _same(one, processes)}
    anchored = any(one == root or processes[one.pid].session == root.pid for one in members)
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
        if anchored and process.session == root.pid:
            members.add(process.identity)
    waiting = list(members)
    while waiting:
        for child in children.get(waiting.pop().pid, ()):
            if child.identity not in members:
                members.add(child.identity)
                waiting.append(child.identity)
    return members


def marked(mark: str, processes: Mapping[int, Process]) -> set[Identity]:
    """Processes whose environment holds `mark`: they stay recognisable after leaving parent and session."""
    wanted = mark.encode()
    return {one.identity for pid, one in processes.items() if one.alive and wanted in _environment(pid)}


def alive(members: Iterable[Identity], processes: Mapping[int, Process]) -> set[Identity]:
    return {one for one in members if _same(one, processes) and processes[one.pid].alive}


def kill(one: Identity) -> None:
    """SIGKILL exactly this process; no other that was given its pid since."""
    try:
        handle = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return
    try:
        if identify(one.pid) == one:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def segments(pid: int) -> set[Segment]:
    """The files in /dev/shm that a process maps; none where it is gone or not ours to look at."""
    try:
        text = (PROC / str(pid) / "maps").read_text(errors="replace")
    except (*_GONE, PermissionError):
        return set()
    inodes = {int(line.split(None, 5)[4]) for line in text.splitlines() if SHM in line}
    return {Segment(path, inode) for inode, path in _names().items() if inode in inodes} if inodes else set()


def _names() -> dict[int, str]:
    """Inode → path of what lies in /dev/shm: a semaphore's creator maps it under a name that is gone already."""
    with os.scandir(SHM) as entries:
        return {entry.inode(): entry.path for entry in entries}


def unlink(segment: Segment) -> None:
    """Remove a segment that no living process maps; a file that took its name since is left alone."""
    try:
        if os.stat(segment.path).st_ino == segment.inode:
            os.unlink(segment.path)
    except FileNotFoundError:
        return


def _same(one: Identity, processes: Mapping[int, Process]) -> bool:
    process = processes.get(one.pid)
    return process is not None and process.identity == one


def _environment(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except (*_GONE, PermissionError):
        return b""
