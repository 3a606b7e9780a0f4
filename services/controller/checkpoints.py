"""The checkpoints of a job: which is the newest."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .progress import Progress

_COMPLETE = re.compile(r"step-(\d{8,})")


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """The newest complete checkpoint in `folder` and how far it had come, or None where there is none."""
    entries = folder.iterdir() if folder.is_dir() else ()
    complete = [path for path in entries if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    if not complete:
        return None
    found = max(complete, key=lambda path: path.name)
    manifest = json.loads((found / "manifest.json").read_text())
    return found, Progress(manifest["step"], manifest["position"])
