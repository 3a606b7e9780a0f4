"""Job files: YAML, TOML or JSON text to a JobSpec, with errors that name the file, the field and the likely meaning."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput, NotFound
from nereus_common.core.plan import Plan, plan_from_dict

DEMO_SCHEME = "demo:"
SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def load_spec(path: Path | str, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Read a job file. Relative paths in it are relative to its folder.

    NotFound when there is no such file; InvalidInput names the file and every field that is wrong.
    """
    path = Path(path)
    data = read_mapping(path)
    for dotted, value in (overrides or {}).items():
        _assign(data, dotted.split("."), value)
    return JobSpec.from_dict(_absolute(data, path.resolve().parent), origin=str(path))


def load_plan(path: Path | str) -> Plan:
    """Read a plan as it stands under `plan:` in a job file, with that key or without it; a job file will do.

    NotFound when there is no such file; InvalidInput names what is wrong.
    """
    path = Path(path)
    data = read_mapping(path, "plan")
    plan = data.get("plan", data)
    try:
        if not isinstance(plan, dict):
            raise InvalidInput("plan holds no mapping", remedy="map model-stages to layout and devices", field="plan")
        return plan_from_dict(plan)
    except InvalidInput as wrong:
        raise type(wrong)(f"{path}: {wrong.message}", remedy=wrong.remedy, **dict(wrong.details)) from wrong


def read_mapping(path: Path, what: str = "job") -> dict[str, Any]:
    """The file's top level. NotFound; InvalidInput when it cannot be read as what its ending says."""
    if not path.is_file():
        raise NotFound(f"{what} file {path} does not exist", remedy="give a .yaml, .toml or .json file", path=path)
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".yaml" | ".yml":
                data = yaml.safe_load(text)
            case ".toml":
                data = tomllib.loads(text)
            case ".json":
                data = json.loads(text)
            case other:
                raise InvalidInput(f"{path}: {other!r} is no {what} file", remedy="give a .yaml, .toml or .json file")
    except (yaml.YAMLError, tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as wrong:
        raise InvalidInput(f"{path} cannot be read: {wrong}", field="file") from wrong
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} holds no {what}", remedy="write field: value lines", field="file")
    return data


def _assign(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InvalidInput(f"{'.'.join(keys)} cannot be set: {key} holds a value", field=".".join(keys))
        data = inner
    data[keys[-1]] = value


def _absolute(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Model folders and files of prompts, rewards and environments, wherever the job file names them, made absolute."""

    def place(text: Any) -> Any:
        return str(folder / text) if isinstance(text, str) and not text.startswith(DEMO_SCHEME) else text

    def model(entry: Any) -> Any:
        return {**entry, "path": place(entry.get("path"))} if isinstance(entry, dict) else place(entry)

    def code(entry: Any) -> Any:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if not isinstance(name, str) or ".py:" not in name:
            return entry
        return {**entry, "name": place(name)} if isinstance(entry, dict) else place(name)

    result = dict(data)
    if "model" in data:
        result["model"] = model(data["model"])
    if isinstance(data.get("models"), dict):
        result["models"] = {name: model(entry) for name, entry in data["models"].items()}
    if isinstance(data.get("prompts"), dict) and "file" in data["prompts"]:
        result["prompts"] = {**data["prompts"], "file": place(data["prompts"]["file"])}
    if isinstance(data.get("rewards"), list):
        result["rewards"] = [code(entry) for entry in data["rewards"]]
    if "environment" in data:
        result["environment"] = code(data["environment"])
    return result
