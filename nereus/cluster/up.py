"""Starting a cluster on one machine: the registry, then the five services, each a detached process."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import Report, stop_all
from nereus.cluster.launch import SERVICES, await_all, start_registry, start_service
from nereus.cluster.mend import mend
from nereus.cluster.settings import service_settings
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus_common.rpc.ports import usable_port


def up(folder: ClusterFolder, config: ClusterConfig, *, report: Report = lambda text: None) -> ClusterState:
    """Start what does not run yet. Of a cluster that runs in part the rest is started again, where it was before, and
    one that runs whole is returned as it is; `config` is for what starts for the first time.

    ResourceExhausted when a port is taken, ProcessLost and DeadlineExceeded when a service does not come up: nothing
    that was started here is left then, and what ran before still runs.
    """
    with folder.locked():
        earlier = folder.read()
        if earlier is not None and any(member.alive for member in earlier.members):
            return mend(folder, config, earlier, report)
        state = ClusterState(uuid.uuid4().hex, config.host, "", "", config.device_ids)
        try:
            return _start(folder, config, state, report)
        except BaseException:
            report("cleaning up")
            stop_all(folder, folder.read() or state, grace=config.stop_seconds, report=report)
            raise


def _start(folder: ClusterFolder, config: ClusterConfig, state: ClusterState, report: Report) -> ClusterState:
    until = time.monotonic() + config.start_seconds
    ports = {
        name: usable_port(config.host, config.controller_port if name == "controller" else 0, name) for name in SERVICES
    }
    if config.registry is None:
        state = start_registry(folder, state, report)
    else:
        state = replace(state, registry=config.registry)
    state = replace(state, controller=f"{config.host}:{ports['controller']}")
    for name in SERVICES:
        report(f"starting {name}")
        settings = service_settings(name, config, folder, state.registry, ports[name])
        state = start_service(folder, state, name, settings)
    await_all(state.members, until, report)
    return state
