"""Starting a cluster on one machine: the registry, then the five services, each a detached process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import REGISTRY, Report, stop_all
from nereus.cluster.settings import service_settings
from nereus.cluster.spawn import await_serving, free_port, spawn
from nereus.cluster.state import ClusterFolder, ClusterState, Member
from nereus_common.core.errors import Conflict
from nereus_common.workers import processes

SERVICES = ("coordinator", "generation", "inference", "training", "controller")


def up(folder: ClusterFolder, config: ClusterConfig, *, report: Report = lambda text: None) -> ClusterState:
    """Start what does not run yet; a cluster that runs whole is returned as it is.

    Conflict when only parts of an earlier one run. ResourceExhausted when a port is taken, ProcessLost and
    DeadlineExceeded when a service does not come up: nothing that was started here is left then.
    """
    with folder.locked():
        earlier = folder.read()
        if earlier is not None and (running := _running(earlier)) is not None:
            report("already running")
            return running
        state = ClusterState(uuid.uuid4().hex, config.host, "", "", config.device_ids)
        try:
            return _start(folder, config, state, report)
        except BaseException:
            report("cleaning up")
            stop_all(folder, folder.read() or state, grace=config.stop_seconds, report=report)
            raise


def _running(state: ClusterState) -> ClusterState | None:
    """The cluster if all of it runs, None if none of it does."""
    alive = [member for member in state.members if member.alive]
    if not alive:
        return None
    if len(alive) < len(SERVICES) or len(alive) < len(state.members):
        dead = sorted({*SERVICES, *(m.name for m in state.members)} - {member.name for member in alive})
        raise Conflict(
            f"of the cluster only {', '.join(member.name for member in alive)} run, {', '.join(dead)} do not",
            remedy="run `nereus down`, then `nereus up`",
        )
    return state


def _start(folder: ClusterFolder, config: ClusterConfig, state: ClusterState, report: Report) -> ClusterState:
    until = time.monotonic() + config.start_seconds
    ports = {
        name: free_port(config.host, config.controller_port if name == "controller" else 0, name) for name in SERVICES
    }
    state = _with_registry(folder, config, state, report)
    state = replace(state, controller=f"{config.host}:{ports['controller']}")
    for name in SERVICES:
        report(f"starting {name}")
        settings = service_settings(name, config, folder, state.registry, ports[name])
        arguments = ["-m", f"nereus_{name}", "--config", str(_write_config(folder, name, settings))]
        target = f"{config.host}:{ports[name]}"
        member = spawn(name, arguments, target=target, log=folder.logs / f"{name}.out", mark=state.mark)
        state = state.with_member(member)
        folder.write(state)
    for member in state.members:
        if member.name != REGISTRY:
            report(f"waiting for {member.name}")
            await_serving(member, max(0.0, until - time.monotonic()))
    return state


def _with_registry(folder: ClusterFolder, config: ClusterConfig, state: ClusterState, report: Report) -> ClusterState:
    state = replace(state, registry=config.registry or "")
    if config.registry is None:
        from nereus_common.registry import embedded

        report("starting registry")
        server = embedded.start(folder.registry)
        identity = processes.identify(server.pid)
        assert identity is not None, "the server answered a moment ago"
        log = str(folder.registry / "valkey.log")
        state = replace(state, registry=server.url).with_member(Member(REGISTRY, *identity, server.url, log))
        folder.write(state)
    return state


def _write_config(folder: ClusterFolder, name: str, settings: Mapping[str, Any]) -> Path:
    folder.configs.mkdir(parents=True, exist_ok=True)
    path = folder.configs / f"{name}.yaml"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)  # the registry's URL may hold a password
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    return path
