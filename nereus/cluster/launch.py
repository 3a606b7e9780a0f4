"""Starting one process of a cluster, for the first time or again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from nereus.cluster.down import REGISTRY, Report
from nereus.cluster.spawn import await_serving, spawn
from nereus.cluster.state import ClusterFolder, ClusterState, Member
from nereus_common.workers import processes

SERVICES = ("coordinator", "generation", "inference", "training", "controller")
"""In the order in which they start."""


def start_registry(folder: ClusterFolder, state: ClusterState, report: Report) -> ClusterState:
    """Start the embedded server, or find the one that runs, and remember it."""
    from nereus_common.registry import embedded

    report("starting registry")
    server = embedded.start(folder.registry)
    identity = processes.identify(server.pid)
    assert identity is not None, "the server answered a moment ago"
    log = str(folder.registry / "valkey.log")
    state = replace(state, registry=server.url).with_member(Member(REGISTRY, *identity, server.url, log))
    folder.write(state)
    return state


def start_service(
    folder: ClusterFolder, state: ClusterState, name: str, settings: Mapping[str, Any], *, append_log: bool = False
) -> ClusterState:
    """Start a service under its settings, and remember it; it need not serve yet."""
    arguments = ["-m", f"nereus_{name}", "--config", str(_write_config(folder, name, settings))]
    target = f"{state.host}:{settings['port']}"
    log = folder.logs / f"{name}.out"
    state = state.with_member(spawn(name, arguments, target=target, log=log, mark=state.mark, append=append_log))
    folder.write(state)
    return state


def await_all(members: Iterable[Member], until: float, report: Report) -> None:
    """Wait until all services among `members` serve; `until` as `time.monotonic` counts."""
    for member in members:
        if member.name != REGISTRY:
            report(f"waiting for {member.name}")
            await_serving(member, max(0.0, until - time.monotonic()))


def config_file(folder: ClusterFolder, name: str) -> Path:
    return folder.configs / f"{name}.yaml"


def _write_config(folder: ClusterFolder, name: str, settings: Mapping[str, Any]) -> Path:
    folder.configs.mkdir(parents=True, exist_ok=True)
    path = config_file(folder, name)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)  # the registry's URL may hold a password
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    return path
