"""Ends this process when a process it depends on ends: half an engine must not look like a whole one."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from nereus_common.engines.generation.scratch import Scratch

_SETTLE_SECONDS = 0.5
"""For what the dying process and its peers have to say to reach the log first."""


class Watch:
    """A thread waiting on `pids` (name → process id) by pidfd; ends this process with status 1 when one is gone.

    `scratch` is removed first.
    """

    def __init__(self, unit: str, pids: Mapping[str, int], scratch: Scratch) -> None:
        self._unit = unit
        self._scratch = scratch
        self._names = {os.pidfd_open(pid): f"{name} (pid {pid})" for name, pid in pids.items()}
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """From here on the processes may end."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        for descriptor in (*self._names, self._stop_read, self._stop_write):
            os.close(descriptor)

    def _wait(self) -> None:
        poll = select.poll()
        for descriptor in (*self._names, self._stop_read):
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        if self._stop_read in ready:
            return
        threading.Event().wait(_SETTLE_SECONDS)
        # one that dies takes others with it: name all that are gone by now
        gone = ", ".join(self._names[descriptor] for descriptor, _ in poll.poll(0) if descriptor in self._names)
        os.write(2, f"unit {self._unit}: engine process {gone} ended unasked; the engine cannot go on\n".encode())
        self._scratch.remove()
        os._exit(1)
