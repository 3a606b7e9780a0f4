"""What a one-machine cluster is made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from nereus_common.config import Bytes, Name, Seconds, Settings, load
from nereus_common.core.errors import InvalidInput

DATA_DIR_VARIABLE = "NEREUS_DATA_DIR"
CPU_DEVICES = 4
CPU_DEVICE_BYTES = 6 << 30


def default_data_dir() -> Path:
    """$NEREUS_DATA_DIR, else `nereus` in the user's data directory."""
    if named := os.environ.get(DATA_DIR_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "nereus"


class ClusterConfig(Settings):
    """`devices`: slot → byte budget. `registry`: a redis:// URL, or None for the embedded server.

    `controller_port` 0 takes any free port; the other services always do. `services`: more settings for a service, by
    its name.
    """

    node: Name = "node0"
    host: str = "127.0.0.1"
    devices: dict[Name, Bytes] = Field(
        default_factory=lambda: {f"cpu{slot}": CPU_DEVICE_BYTES for slot in range(CPU_DEVICES)}
    )
    registry: str | None = None
    controller_port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_seconds: Seconds = 120.0
    stop_seconds: Seconds = 30.0
    services: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("devices")
    @classmethod
    def _some_device(cls, value: dict[str, int]) -> dict[str, int]:
        if not value:
            raise ValueError("a cluster needs at least one device")
        return value

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(f"{self.node}/{slot}" for slot in self.devices)


def load_cluster_config(path: Path | None, **overrides: Any) -> ClusterConfig:
    """The config in a YAML file, or the default one; NotFound and InvalidInput name the file and the field.

    Overrides that are not None replace what the file says.
    """
    config = load(ClusterConfig, path, {})
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return ClusterConfig.model_validate({**config.model_dump(), **given})
    except ValueError as wrong:
        raise InvalidInput(f"cluster config: {wrong}", field=", ".join(given)) from wrong
