"""Entry of a worker process: `python -m nereus_common.workers.child SOCKET_FD PARENT_PID`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; leave at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def work(descriptor: int, parent: int) -> int:
    """Serve the socket until it says stop; the exit status."""
    die_with(parent)
    faulthandler.enable()
    from nereus_common.workers.serving import serve  # after the guard: imports take a while

    return serve(descriptor)


if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:3])  # the name that follows is for whoever reads the process list
    sys.exit(work(descriptor, parent))
