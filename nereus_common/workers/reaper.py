"""The reaper: a small process that outlives its service by the moment it takes to clean up after it.

    python -m nereus_common.workers.reaper        (started by `reaping.ReaperLink`)

On stdin it is told `watch PID START MARK` and `sweep PID START`. It looks at the watched processes and their
descendants twice a second and remembers them and the /dev/shm segments they map. When a watched process is gone,
when it is told to sweep, and when stdin ends (the service died, however), it kills what is left of the family and
unlinks the remembered segments that no living process maps. A sweep is answered with `swept PID START LEFT`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field

from nereus_common.workers import processes
from nereus_common.workers.processes import Identity, Process, Segment

POLL_SECONDS = 0.5
KILL_SECONDS = 10.0
"""A driver may take seconds to give up the memory of a dying process."""


@dataclass
class Watch:
    """One worker: its root process, and what was ever seen of it."""

    root: Identity
    mark: str
    members: set[Identity] = field(default_factory=set)
    segments: set[Segment] = field(default_factory=set)
    swept: bool = False

    def look(self, table: dict[int, Process]) -> None:
        self.members = processes.family(self.root, self.members, table)
        for one in self.members:
            self.segments |= processes.segments(one.pid)

    def sweep(self) -> int:
        """Kill the family and unlink its segments; return how many would not die within KILL_SECONDS."""
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            table = processes.snapshot()
            self.members |= processes.marked(self.mark, table)
            self.look(table)
            left = processes.alive(self.members, table)
            if not left or time.monotonic() > deadline:
                break
            for one in left:
                processes.kill(one)
            time.sleep(0.01)
        self._unlink(table)
        self.swept = not left
        return len(left)

    def _unlink(self, table: dict[int, Process]) -> None:
        if not self.segments:
            return
        mapped = {segment for pid in table for segment in processes.segments(pid)}
        for segment in self.segments - mapped:
            processes.unlink(segment)


class Reaper:
    def __init__(self) -> None:
        self._watches: dict[Identity, Watch] = {}
        self._buffer = b""

    def run(self, commands: int) -> None:
        """Serve until `commands` ends, then sweep everything."""
        while self._read(commands):
            table = processes.snapshot()
            for watch in list(self._watches.values()):
                watch.look(table)
                if not watch.swept and not processes.alive([watch.root], table):
                    watch.sweep()
        for watch in self._watches.values():
            watch.sweep()

    def _read(self, commands: int) -> bool:
        """Obey what came within one poll; False at the end of input."""
        ready, _, _ = select.select([commands], [], [], POLL_SECONDS)
        if not ready:
            return True
        piece = os.read(commands, 65536)
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            self._obey(line.decode())
        return bool(piece)

    def _obey(self, line: str) -> None:
        verb, pid, start, *rest = line.split()
        root = Identity(int(pid), int(start))
        if verb == "watch":
            self._watches.setdefault(root, Watch(root, rest[0]))
            return
        watch = self._watches.pop(root, None)
        left = 0 if watch is None else watch.sweep()
        try:
            os.write(sys.stdout.fileno(), f"swept {pid} {start} {left}\n".encode())
        except BrokenPipeError:
            return  # nobody waits any more; stdin is about to end


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Reaper().run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
