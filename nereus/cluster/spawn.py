"""Detached service processes: how one is started, watched until it serves, and stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from nereus.cluster.state import Member
from nereus_common.core.errors import DeadlineExceeded, ProcessLost
from nereus_common.workers import processes

MARK_VARIABLE = "_NEREUS_CLUSTER"
_OWN_VARIABLES = ("NEREUS_TARGET", "NEREUS_DATA_DIR")
"""Read by the commands; a service would take them for settings of its own."""
LOG_LINES = 20
_POLL_SECONDS = 0.05


def spawn(name: str, arguments: list[str], *, target: str, log: Path, mark: str, append: bool = False) -> Member:
    """Start `python ARGUMENTS` in a session of its own, writing to `log`; it outlives this process.

    `append`: keep what an earlier life wrote there, which may say why it ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    how = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    environment = {key: value for key, value in os.environ.items() if key not in _OWN_VARIABLES}
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, *arguments],
        {**environment, "PYTHONUNBUFFERED": "1", MARK_VARIABLE: mark},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), how, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    identity = processes.identify(pid)
    assert identity is not None, "an unreaped child is always in the process table"
    return Member(name, identity.pid, identity.start, target, str(log))


def await_serving(member: Member, timeout: float) -> None:
    """Return when the member's gRPC health check says SERVING.

    ProcessLost when it ends before, DeadlineExceeded after `timeout` seconds; both carry the end of its log.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    until = time.monotonic() + timeout
    last = "it does not listen"
    with grpc.insecure_channel(member.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < until:
            if not member.alive:
                reap(member)
                raise ProcessLost(
                    f"{member.name} (pid {member.pid}) ended while it was starting",
                    remedy=f"its log is {member.log}",
                    process=member.name,
                    log=log_tail(member),
                )
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = "it says that it is not serving"
            except grpc.RpcError as error:
                last = f"{error.code().name}: {error.details()}"
            time.sleep(_POLL_SECONDS)
    raise DeadlineExceeded(
        f"{member.name} (pid {member.pid}) does not serve on {member.target} after {timeout:g} s: {last}",
        remedy=f"its log is {member.log}",
        process=member.name,
        log=log_tail(member),
    )


def terminate(member: Member, grace: float) -> bool:
    """SIGTERM, then SIGKILL after `grace` seconds; whether it went by itself."""
    if not member.alive:
        reap(member)
        return True
    os.kill(member.pid, signal.SIGTERM)
    until = time.monotonic() + grace
    while member.alive and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    gone = not member.alive
    if not gone:
        processes.kill(member.identity)
    reap(member)
    return gone


def reap(member: Member) -> None:
    """Collect the exit status where the member is this process's child, so that no zombie stays."""
    try:
        until = time.monotonic() + 5.0
        while os.waitpid(member.pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    except ChildProcessError:
        return


def log_tail(member: Member, lines: int = LOG_LINES) -> str:
    path = Path(member.log)
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""
