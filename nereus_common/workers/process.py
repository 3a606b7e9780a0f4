"""One child process seen from its parent: how it is started, how its end is noticed, what its log said last."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from nereus_common.core.errors import DeadlineExceeded, ProcessLost
from nereus_common.workers import processes
from nereus_common.workers.environment import MARK, environment
from nereus_common.workers.reaping import ReaperLink
from nereus_common.workers.templates import Template

LOG_LINES = 20
_TAIL_BYTES = 1 << 16


class ChildProcess:
    """A worker process in a session of its own, watched by the reaper from its first moment."""

    def __init__(self, name: str, env: Mapping[str, str], log_path: Path, template: Template | None = None) -> None:
        """Start it, as a fork of `template` if there is one, which has `env` already.

        The calling thread must live as long as the child may: the kernel kills it with this thread. ProcessLost when
        the template has ended.
        """
        self.name = name
        self._log_path = log_path
        self._reaper = ReaperLink.shared()
        self._template = template
        mark = uuid.uuid4().hex
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.socket, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._log_start = log.tell()
            if template is None:
                self._popen = _execute(name, environment(env, mark), theirs.fileno(), log)
                self.pid = self._popen.pid
            else:
                self.pid = template.fork(name, {MARK: mark}, theirs.fileno(), log.fileno())
        identity = processes.identify(self.pid)
        assert identity is not None, "an unreaped child is always in the process table"
        self._identity = identity
        self._returncode: int | None = None
        self._reaper.watch(identity, mark)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handle = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._handle, self._notice_end)

    def kill_group(self) -> None:
        """SIGKILL everything still in the child's process group; nothing happens once the child is reaped."""
        if self._returncode is None and processes.identify(self.pid) == self._identity:
            os.killpg(self.pid, signal.SIGKILL)

    async def sweep(self, timeout: float) -> None:
        """Wait until the reaper has killed the family and unlinked its segments; DeadlineExceeded where it did not."""
        sweeping = asyncio.wrap_future(self._reaper.sweep(self._identity))
        await asyncio.wait([sweeping], timeout=timeout)
        left = sweeping.result() if sweeping.done() else "some"
        if left:
            raise DeadlineExceeded(
                f"{left} processes of worker {self.name} (pid {self.pid}) did not die within {timeout:g} s of SIGKILL",
                remedy="a process stuck in the kernel or in a driver needs the node's attention",
                process=self.name,
                pid=self.pid,
            )

    def lost(self, during: str) -> ProcessLost:
        """The error that tells of its end, with the end of its log."""
        lines = self.log_tail()
        return ProcessLost(
            f"worker {self.name} (pid {self.pid}) {self.how_it_ended()} {during}".rstrip(),
            remedy=f"its log is {self._log_path}",
            process=self.name,
            pid=self.pid,
            exit=self.how_it_ended(),
            log="\n".join(lines),
        )

    def how_it_ended(self) -> str:
        code = self._returncode
        if code is None:
            return "has not ended"
        if code >= 0:
            return f"exited with status {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def log_tail(self) -> list[str]:
        """The last lines that this process wrote, not those of an earlier one with the same log."""
        if not self._log_path.exists():
            return [f"({self._log_path} was removed)"]
        with self._log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-LOG_LINES:]

    def _notice_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        # before reaping: while the child is a zombie its group cannot be anyone else's
        self.kill_group()
        self._returncode = self._popen.wait() if self._template is None else self._template.reap(self.pid)
        self.ended.set_result(None)


def _execute(name: str, env: Mapping[str, str], connection: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "nereus_common.workers.child", str(connection), str(os.getpid()), name],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[connection],
        start_new_session=True,
        env=env,
    )
