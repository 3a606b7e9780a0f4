"""The settings file of each service of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus.cluster.config import ClusterConfig
from nereus.cluster.state import ClusterFolder

STAGES = ("generation", "inference", "training")


def service_settings(
    name: str, config: ClusterConfig, folder: ClusterFolder, registry: str, port: int
) -> Mapping[str, Any]:
    """What `name` is told; `config.services[name]` is laid over it. Stage services alone are given devices."""
    devices = [{"slot": slot, "memory_bytes": size} for slot, size in config.devices.items()]
    return {
        "name": name,
        "node": config.node,
        "host": config.host,
        "port": port,
        "registry_url": registry,
        "data_dir": str(folder.path),
        "log_dir": str(folder.logs),
        **({"devices": devices} if name in STAGES else {}),
        **config.services.get(name, {}),
    }
