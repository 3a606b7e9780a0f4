"""The service's side of templates: one per set of modules and environment, started when first asked for."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nereus_common.core.errors import ProcessLost
from nereus_common.workers import processes
from nereus_common.workers.environment import environment
from nereus_common.workers.reaping import ReaperLink

MESSAGE = 1 << 20
"""Bytes of a request or an answer, at most."""
TITLE = 200
"""Bytes of a template's command line that its children write their own over."""
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.02


class Template:
    """A process that forks workers. Made by the thread whose end is to be its end, and its workers'."""

    _shared: ClassVar[dict[Hashable, Template]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    async def of(cls, modules: tuple[str, ...], env: Mapping[str, str], log_path: Path) -> Template | None:
        """The one of this thread that has imported `modules` under `env`, once it has; None where it could not.

        Whoever gets None imports itself, and is told what is wrong.
        """
        key = threading.get_ident(), modules, frozenset(env.items()), tuple(sys.path)
        with cls._guard:
            template = cls._shared.get(key)
            if template is not None and template._process.poll() is not None:
                template._socket.close()
                template = None
            if template is None:
                template = cls._shared[key] = cls(modules, env, log_path)
        return template if await template._is_ready() else None

    def __init__(self, modules: tuple[str, ...], env: Mapping[str, str], log_path: Path) -> None:
        mark = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._ready: bool | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "nereus_common.workers.template"]
        with theirs, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), ",".join(modules), " " * TITLE],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment(env, mark),
            )
        identity = processes.identify(self._process.pid)
        assert identity is not None, "an unreaped child is always in the process table"
        ReaperLink.shared().watch(identity, mark)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, name: str, env: Mapping[str, str], connection: int, log: int) -> int:
        """A new worker, named so; its pid. ProcessLost when the template has ended."""
        return int(self._ask({"fork": name, "env": dict(env)}, connection, log)["pid"])

    def reap(self, pid: int) -> int:
        """The return code of a worker that is a zombie, as `subprocess` has it."""
        try:
            return int(self._ask({"reap": pid})["status"])
        except ProcessLost:
            return -signal.SIGKILL  # the kernel did that, when the template ended

    async def _is_ready(self) -> bool:
        """Polled, because loops come and go in a thread, and nobody may wait for an import in a thread of its own."""
        while self._ready is None:
            if select.select([self._socket], [], [], 0)[0]:
                self._ready = bool(self._heard(ANSWER_SECONDS))
            else:
                await asyncio.sleep(POLL_SECONDS)
        return self._ready

    def _ask(self, request: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                answer = self._heard(ANSWER_SECONDS)
            except OSError:
                answer = {}
        if not answer:
            raise ProcessLost(f"the template of worker processes (pid {self.pid}) has ended", process="template")
        return answer

    def _heard(self, timeout: float) -> dict[str, Any]:
        """The next answer; nothing when the template ended or is silent for `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            text = self._socket.recv(MESSAGE)
        except OSError:
            return {}
        return dict(json.loads(text)) if text else {}
