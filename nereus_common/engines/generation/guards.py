"""No vLLM process outlives its owner, and none leaves shared memory behind.

vLLM starts EngineCore, which starts one worker per rank. A process killed by SIGKILL tells nobody, so the kernel must:
every one of them asks for SIGKILL when its parent dies. Shared memory here, by name in /dev/shm:

    psm_XXXXXXXX                              ring buffers between EngineCore and its workers (two per rank, at most)
    vllm_dist_UUID-tp:0-[RANKS]-cpushm_RANK   all-reduce buffers of tensor-parallel ranks on CPU

    sem.mp-XXXXXXXX                           a lock of EngineCore's that all workers share

The buffers are only looked up by name while the engine starts, and are unlinked as soon as every user has mapped them,
so no end, however sudden, can leave one. The lock is unlinked by multiprocessing's tracker, or by the reaper of
`nereus_common.workers` where that is killed too. Sockets and the rendezvous file live in the engine's scratch folder.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_WAKE_UPS = 1024
_log = logging.getLogger(__name__)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; leave at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def unlink_ring_buffers_early() -> None:
    """Unlink a ring buffer when its last reader has opened it, instead of when its creator ends."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    def unlink(queue: Any) -> None:
        buffer = getattr(queue, "buffer", None)
        if buffer is not None and buffer.is_creator:
            buffer.is_creator = False  # its __del__ would unlink a second time
            buffer.shared_memory.unlink()

    _after(MessageQueue, "wait_until_ready", unlink)


def unlink_reduce_buffers_early() -> None:
    """Unlink a rank's all-reduce buffer when all ranks have joined it."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def unlink(group: Any) -> None:
        name = f"{group.group_name}_{group.communicator.rank}"
        (_SHARED_MEMORY / name).unlink(missing_ok=True)

    _after(_CPUSHMDistributed, "_init_cpu_shm", unlink)


def block_instead_of_spinning(seconds: float) -> None:
    """Let the reader of a ring buffer block `seconds` after it last read; vLLM's own 1 s burns the cores others need.

    vLLM spins because its wake-ups get lost: they go through a socket that keeps one message and drops the next, so a
    reader can sleep beside a message until its 5 s recheck. With room for more of them none is lost.
    """
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def repair(condition: Any) -> None:
        condition.busy_loop_s = seconds
        if not condition.is_reader:
            socket = condition.local_notify_socket
            endpoint = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            socket.unbind(endpoint)
            socket.setsockopt(zmq.SNDHWM, _WAKE_UPS)  # counts for what is bound after it
            socket.bind(endpoint)

    _after(SpinCondition, "__init__", repair)


def _after(owner: type, method: str, then: Callable[[Any], None]) -> None:
    original = getattr(owner, method)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self)
        return result

    setattr(owner, method, wrapped)
