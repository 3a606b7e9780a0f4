"""What runs: `cluster.json` in the data directory, written after every process that starts or ends.

It is the pidfile of the whole cluster: a pid stands there with its process's start time, so that a number the kernel
has given to a stranger since is never taken for one of ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from nereus_common.core.errors import Conflict, NotFound
from nereus_common.workers import processes
from nereus_common.workers.processes import Identity


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster. `start`: clock ticks since boot; `target`: its gRPC target, or the registry's URL."""

    name: str
    pid: int
    start: int
    target: str
    log: str

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start)

    @property
    def alive(self) -> bool:
        process = processes.read(self.pid)
        return process is not None and process.identity == self.identity and process.alive


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`mark` stands in the environment of every process of the cluster."""

    mark: str
    host: str
    controller: str
    registry: str
    devices: tuple[str, ...]
    members: tuple[Member, ...] = field(default=())

    def with_member(self, member: Member) -> ClusterState:
        """With a process added, in the place of an earlier one of its name."""
        others = tuple(other for other in self.members if other.name != member.name)
        return replace(self, members=(*others, member))

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)


class ClusterFolder:
    """The data directory of one cluster and what lies where in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def configs(self) -> Path:
        return self.path / "config"

    @property
    def registry(self) -> Path:
        return self.path / "registry"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def models(self) -> Path:
        return self.path / "models"

    def read(self) -> ClusterState | None:
        """What was last written, or None."""
        try:
            data = json.loads(self.file.read_text())
        except FileNotFoundError:
            return None
        members = tuple(Member(**member) for member in data.pop("members"))
        return ClusterState(**{**data, "devices": tuple(data["devices"])}, members=members)

    def require(self) -> ClusterState:
        """What was last written; NotFound when nothing was."""
        state = self.read()
        if state is None:
            raise NotFound(f"no cluster is known in {self.path}", remedy="start one with `nereus up`", path=self.path)
        return state

    def write(self, state: ClusterState) -> None:
        scratch = self.file.with_suffix(".new")
        scratch.unlink(missing_ok=True)
        scratch.touch(mode=0o600)  # the registry's URL may hold a password
        scratch.write_text(json.dumps(asdict(state), indent=2))
        os.replace(scratch, self.file)

    def forget(self) -> None:
        self.file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder while it is changed; Conflict when another command holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError as held:
                raise Conflict(
                    f"another `nereus up` or `nereus down` is at work in {self.path}", remedy="wait for it to end"
                ) from held
            yield
