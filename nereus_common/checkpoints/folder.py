"""The folder of a job's checkpoints: how one becomes complete, which are, which go.

    step-00000012.partial/   being written, or left by who died; nobody reads it
    step-00000012/           complete: the name is given by one rename after everything is on the disk

One writer at a time. All functions block on the file system.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from nereus_common.checkpoints.manifest import MANIFEST, Manifest
from nereus_common.core.errors import Conflict, NotFound

_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(root: Path) -> dict[int, Path]:
    """Step → folder of every complete checkpoint, oldest first; none where `root` does not exist."""
    entries = root.iterdir() if root.is_dir() else ()
    named = ((match, path) for path in entries if (match := _COMPLETE.fullmatch(path.name)) and path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in named))


def find(root: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, or the newest; NotFound names those there are."""
    known = complete(root)
    if not known or step not in (None, *known):
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        there = f"there are those of steps {', '.join(map(str, known))}" if known else "there is none yet"
        raise NotFound(f"{root} holds no complete {wanted}", remedy=there, field="step")
    return known[max(known) if step is None else step]


def begin(root: Path, step: int, models: Iterable[str]) -> Path:
    """A folder to write into, with one folder per model; what others left unfinished is swept away.

    Conflict when there is a complete checkpoint of this step: a job never writes one twice, so it is somebody else's.
    """
    if step in complete(root):
        raise Conflict(
            f"{root} holds a checkpoint of step {step} already",
            remedy="give each job a folder of its own: checkpoint.folder",
            field="checkpoint.folder",
        )
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    partial = root / (step_name(step) + _PARTIAL)
    for model in models:
        (partial / model).mkdir(parents=True)
    return partial


def commit(partial: Path, manifest: Manifest) -> Path:
    """Make it complete: everything durable, then the rename. The ranks' files are durable already."""
    (partial / MANIFEST).write_text(manifest.to_json())
    for name, entry in manifest.models.items():
        _sync(partial / entry.index)
        _sync(partial / name)
    _sync(partial / MANIFEST)
    _sync(partial)
    target = partial.with_name(step_name(manifest.step))
    partial.rename(target)
    _sync(partial.parent)
    return target


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and whatever is unfinished.

    Each loses its name first, so that one removed by half is never taken for complete.
    """
    for step, path in list(complete(root).items())[:-keep]:
        path.rename(root / f"{step_name(step)}.pruned{_PARTIAL}")
    sweep(root)


def sweep(root: Path) -> None:
    """Remove everything unfinished."""
    for path in root.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
