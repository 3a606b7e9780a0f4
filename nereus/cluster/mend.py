"""A cluster of which a part has died: what is missing starts again, with its settings and on its port of before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import ORDER, REGISTRY, Report
from nereus.cluster.launch import SERVICES, await_all, config_file, start_registry, start_service
from nereus.cluster.settings import service_settings
from nereus.cluster.spawn import terminate
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus_common.core.errors import ResourceExhausted
from nereus_common.rpc.ports import free_port, usable_port

_ORPHAN_GRACE = 5.0
"""Seconds for a service that has lost its registry: it has nobody left to say goodbye to."""

_PORT_SECONDS = 5.0


def mend(folder: ClusterFolder, config: ClusterConfig, state: ClusterState, report: Report) -> ClusterState:
    """Return the cluster with all of it running; errors as `up`. The caller holds the folder's lock."""
    missing = dead(state)
    if not missing:
        report("already running")
        return state
    report(f"{', '.join(missing)} had died")
    until = time.monotonic() + config.start_seconds
    if REGISTRY in missing:
        _stop_orphans(state, report)
        state = start_registry(folder, state, report)
        missing = SERVICES
    try:
        for name in (name for name in SERVICES if name in missing):
            settings = _settings(folder, config, state, name)
            report(f"starting {name} again on port {settings['port']}")
            if name == "controller":
                state = replace(state, controller=f"{state.host}:{settings['port']}")
            state = start_service(folder, state, name, settings, append_log=True)
        await_all((member for member in state.members if member.name in missing), until, report)
    except BaseException:
        for member in (folder.read() or state).members:
            if member.name in missing:
                report(f"stopping {member.name}")
                terminate(member, config.stop_seconds)
        raise
    return state


def dead(state: ClusterState) -> Sequence[str]:
    """Which processes of a cluster do not run, whether they died or never started."""
    alive = {member.name for member in state.members if member.alive}
    wanted = (REGISTRY, *SERVICES) if state.member(REGISTRY) is not None else SERVICES
    return [name for name in wanted if name not in alive]


def _stop_orphans(state: ClusterState, report: Report) -> None:
    """Without a registry the leases of all services lapse, and with them their places in the cluster."""
    for name in ORDER:
        member = state.member(name)
        if member is not None and member.alive:
            report(f"stopping {name}, which has lost its registry")
            terminate(member, _ORPHAN_GRACE)


def _settings(folder: ClusterFolder, config: ClusterConfig, state: ClusterState, name: str) -> Mapping[str, Any]:
    """What the service was told when it last started; from `config` where it never did."""
    path = config_file(folder, name)
    if state.member(name) is None or not path.is_file():
        return service_settings(name, config, folder, state.registry, free_port())
    earlier = yaml.safe_load(path.read_text())
    return {**earlier, "registry_url": state.registry, "port": _port(state.host, earlier["port"], name)}


def _port(host: str, wanted: int, name: str) -> int:
    """The port of before, or another where somebody has taken it since.

    Clients know the old one, so it is waited for: a killed process gives its sockets back a moment after it is gone.
    """
    until = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return usable_port(host, wanted, name)
        except ResourceExhausted:
            if time.monotonic() > until:
                return free_port()
            time.sleep(0.1)
