"""What a complete checkpoint says of itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus_common.checkpoints.fields import FORMAT, Field, read_json
from nereus_common.checkpoints.state import Digests
from nereus_common.core.errors import NotFound

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One trained model: its index, seen from the checkpoint's folder, the index's SHA-256, and the state's digests."""

    index: str
    index_sha256: str
    digests: Digests
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`step` steps are done and the models hold `version`; `position` is the next prompt to be consumed.

    `spec` and `plan`: the job as JSON values. `created`: ISO 8601, UTC.
    """

    job: str
    step: int
    version: int
    position: int
    epoch: int
    created: str
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]
    models: Mapping[str, ModelEntry]

    def model(self, name: str) -> ModelEntry:
        """NotFound names the models there are."""
        if name not in self.models:
            raise NotFound(
                f"the checkpoint of job {self.job} at step {self.step} holds no model {name!r}",
                remedy=f"it holds {', '.join(self.models)}",
                field="model",
            )
        return self.models[name]

    def to_json(self) -> str:
        known = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        models = {name: _entry_to_dict(entry) for name, entry in self.models.items()}
        return json.dumps({"format": FORMAT, **known, "models": models}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """NotFound when the folder has none, VerificationFailed naming the field that is missing or wrong."""
    field = read_json(folder / MANIFEST)
    return Manifest(
        job=field["job"].text,
        step=field["step"].count,
        version=field["version"].count,
        position=field["position"].count,
        epoch=field["epoch"].count,
        created=field["created"].text,
        spec=field["spec"].table,
        plan=field["plan"].table,
        models={name: _entry_from(one) for name, one in field["models"].items()},
    )


def _entry_to_dict(entry: ModelEntry) -> dict[str, Any]:
    return {
        "index": entry.index,
        "index_sha256": entry.index_sha256,
        "digests": entry.digests.to_dict(),
        "bytes": entry.bytes,
    }


def _entry_from(field: Field) -> ModelEntry:
    return ModelEntry(
        field["index"].text, field["index_sha256"].text, Digests.read(field["digests"]), field["bytes"].count
    )
