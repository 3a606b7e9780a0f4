"""A complete checkpoint of a small state, made without engines."""

from __future__ import annotations

from pathlib import Path

from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.index import RankFile, merge, write_index
from nereus_common.checkpoints.manifest import Manifest, ModelEntry
from nereus_common.checkpoints.state import Digests
from tests.unit.checkpoints.test_index import files_of


def manifest(step: int, models: dict[str, ModelEntry] | None = None) -> Manifest:
    spec = {"models": {"actor": {"path": "/nowhere"}}}
    return Manifest("job", step, step, 8 * step, 1, "2026-01-01T00:00:00+00:00", spec, {}, models or {})


def entry(folder: Path, model: str, files: list[RankFile]) -> ModelEntry:
    path, sha256 = write_index(folder / model, merge(files))
    digests = Digests.sum(file.digests for file in files)
    return ModelEntry(str(path.relative_to(folder)), sha256, digests, sum(file.bytes for file in files))


def save(root: Path, step: int, layout: str = "tp2.pp1.fs2") -> Path:
    partial = folders.begin(root, step, ["actor"])
    files = files_of(layout, partial / "actor")
    return folders.commit(partial, manifest(step, {"actor": entry(partial, "actor", files)}))
