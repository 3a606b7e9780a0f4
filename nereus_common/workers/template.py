"""The template of worker processes: it has imported what they need, and forks them.

    python -m nereus_common.workers.template SOCKET_FD PARENT_PID MODULE,MODULE …      (started by `templates.Template`)

Over a SOCK_SEQPACKET socket it says `{"ready": …}` once everything is imported, and then obeys, one at a time:

    {"fork": NAME, "env": {…}} with the worker's socket and its log  ►  {"pid": PID}
    {"reap": PID}, of a child that is a zombie                       ►  {"status": RETURN CODE}

Nothing here starts a thread, and imports must not: only the thread that forks lives on in the child. The end of the
socket ends the template, and the kernel ends its children with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from nereus_common.workers.child import die_with, work
from nereus_common.workers.templates import MESSAGE

_ARGUMENTS = 47, 48
"""Where /proc/PID/stat says between which addresses the command line lies, counted from 0."""


def main() -> int:
    descriptor, parent = map(int, sys.argv[1:3])
    die_with(parent)
    requests = socket.socket(fileno=descriptor)
    for module in sys.argv[3].split(","):
        importlib.import_module(module)
    gc.freeze()  # what all children share stays shared: no collection writes to it
    _answer(requests, {"ready": os.getpid()})
    body = _serve(requests)
    return 0 if body is None else body()


def _serve(requests: socket.socket) -> Callable[[], int] | None:
    """Obey until the socket ends. In a child: return what it has to run."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, MESSAGE, 2)
        if not text:
            return None
        request = json.loads(text)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            _answer(requests, {"status": os.waitstatus_to_exitcode(status)})
            continue
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            requests.close()
            return _become(request["fork"], request["env"], template, *descriptors)
        for one in descriptors:
            os.close(one)
        _answer(requests, {"pid": pid})


def _become(name: str, env: dict[str, str], template: int, connection: int, log: int) -> Callable[[], int]:
    os.setsid()
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(env)
    tempfile.tempdir = None  # as TMPDIR says now
    atexit.register(gc.unfreeze)  # or whatever counts its leaks at the end would count what is frozen
    _entitle(f"{sys.executable} -m nereus_common.workers.child {connection} {template} {name}")
    return lambda: work(connection, template)


def _entitle(title: str) -> None:
    """Write `title` over the command line that process lists show, cut to what was left for it."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = (int(fields[number - 2]) for number in _ARGUMENTS)
    room = end - start - 1
    text = title.encode()[:room].replace(b" ", b"\0")
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


def _answer(requests: socket.socket, content: dict[str, Any]) -> None:
    try:
        requests.sendall(json.dumps(content).encode())
    except BrokenPipeError:
        return  # nobody is there any more: the next read says so


if __name__ == "__main__":
    sys.exit(main())
