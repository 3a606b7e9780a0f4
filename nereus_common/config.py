"""Settings of a service: a YAML file, then `NEREUS_*` of the environment, then nothing: they are frozen.

Fields of fields are written with two underscores: NEREUS_DEADLINES__CALL=30. Values in the environment are read as
YAML, so lists and numbers work. A key that is no field is refused, with the field that is nearest to it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.ids import DeviceId, check_name

PREFIX = "NEREUS_"
NOT_SETTINGS = frozenset(
    {
        "NEREUS_CONFIG",
        "NEREUS_TARGET",
        "NEREUS_REFERENCE_DATA",
        "NEREUS_WORKER_MARK",
        "NEREUS_ENGINE_OWNER",
        "NEREUS_ENGINE_SPIN_SECONDS",
    }
)
"""Variables with the prefix that are read elsewhere."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?")


def read_bytes(value: object) -> object:
    """4096, "4GiB" or "1.5 GB" → bytes; anything else is left for the validator to refuse."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or (match[2] or "") not in _UNITS:
        return value
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _name(value: object) -> object:
    try:
        return check_name(value, "value") if isinstance(value, str) else value
    except InvalidInput as wrong:
        raise ValueError(str(wrong)) from wrong  # pydantic adds where


Bytes = Annotated[int, BeforeValidator(read_bytes), Field(gt=0)]
Name = Annotated[str, BeforeValidator(_name)]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """Base of all settings: frozen, and every key must be a field."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class DeviceSettings(Settings):
    """A slot that a stage service may put one rank on. `cores`: CPU cores to pin to; empty: all."""

    slot: Name
    kind: Literal["cpu", "gpu"] = "cpu"
    memory_bytes: Bytes
    cores: tuple[int, ...] = ()

    def id(self, node: str) -> DeviceId:
        return DeviceId(node, self.slot)


class Deadlines(Settings):
    """Seconds: start of a worker or an engine, one call, one pull of state, the drain before a stop."""

    start: Seconds = 300.0
    call: Seconds = 60.0
    pull: Seconds = 120.0
    drain: Seconds = 10.0


class ServiceSettings(Settings):
    """What every service is told.

    `port` 0 picks a free one; `advertise` is the host that others reach it by, where that is not `host`; `devices`
    are for stage services. `metrics_port`: where Prometheus finds this process on `host`; 0 picks a free one, None
    shows nothing.
    """

    name: Name
    node: Name = Field(default_factory=lambda: socket.gethostname().replace("_", "-")[:63])
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    advertise: str | None = None
    registry_url: str | None = None
    data_dir: Path = Path("var/data")
    log_dir: Path = Path("var/log")
    devices: tuple[DeviceSettings, ...] = ()
    deadlines: Deadlines = Deadlines()

    @property
    def log_path(self) -> Path:
        return self.log_dir / f"{self.name}.log"

    @classmethod
    def from_argv(cls, argv: Sequence[str], env: Mapping[str, str]) -> Self:
        """`[--config FILE]`, else NEREUS_CONFIG, else the environment alone."""
        parser = argparse.ArgumentParser(description=cls.__doc__)
        parser.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")
        file = parser.parse_args(argv).config
        if file is None and "NEREUS_CONFIG" in env:
            file = Path(env["NEREUS_CONFIG"])
        return load(cls, file, env)


S = TypeVar("S", bound=Settings)


def load(kind: type[S], file: Path | None, env: Mapping[str, str]) -> S:
    """Settings from a file and the environment, which wins. NotFound without the file, InvalidInput naming the key."""
    values: dict[str, Any] = {} if file is None else _read(file)
    for variable in sorted(env):
        if variable.startswith(PREFIX) and variable not in NOT_SETTINGS:
            _place(values, variable, env[variable])
    try:
        return kind.model_validate(values)
    except ValidationError as wrong:
        raise _explain(kind, wrong, file) from wrong


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError as missing:
        raise NotFound(f"settings file {file} does not exist", remedy="check --config", file=file) from missing
    except yaml.YAMLError as wrong:
        raise InvalidInput(f"settings file {file} is not YAML: {wrong}", file=file) from wrong
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidInput(f"settings file {file} holds no mapping", remedy="write `key: value` lines", file=file)
    return values


def _place(values: dict[str, Any], variable: str, text: str) -> None:
    *path, last = variable.removeprefix(PREFIX).lower().split("__")
    target = values
    for key in path:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InvalidInput(f"{variable}: {key} is no mapping", field=variable)
        target = inner
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as wrong:
        raise InvalidInput(f"{variable} is not a YAML value: {wrong}", field=variable) from wrong


def _explain(kind: type[Settings], wrong: ValidationError, file: Path | None) -> InvalidInput:
    """The first fault, named by its path."""
    fault = wrong.errors()[0]
    path = ".".join(map(str, fault["loc"]))
    where = f" in {file}" if file is not None else ""
    if fault["type"] != "extra_forbidden":
        message = fault["msg"].removeprefix("Value error, ")
        return InvalidInput(f"settings{where}: {path}: {message}", remedy=f"given: {fault['input']!r}", field=path)
    known = _fields_at(kind, fault["loc"][:-1])
    close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    return InvalidInput(f"settings{where}: {path} is unknown", remedy=remedy, field=path)


def _fields_at(kind: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """The fields of the settings that `path` leads to, through fields and list entries."""
    for key in path:
        if isinstance(key, int):
            continue
        annotation = kind.model_fields[key].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel))
    return list(kind.model_fields)
