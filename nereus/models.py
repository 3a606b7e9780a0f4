"""Model names that stand for a package: turned into a folder once, in a process that may load transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nereus.spec import JobSpec, ModelSpec
from nereus.spec_file import DEMO_SCHEME
from nereus_common.core.errors import DeadlineExceeded, ProcessLost

_SECONDS = 600.0


def with_local_models(spec: JobSpec, models: Path) -> JobSpec:
    """The spec with every `demo:` model replaced by its folder under `models`, converted first where needed.

    Blocks. NotFound when the model's package is missing; ProcessLost when the conversion fails.
    """
    local = {name: _local(model, models) for name, model in spec.models.items()}
    return spec if local == spec.models else spec.model_copy(update={"models": local})


def _local(model: ModelSpec, models: Path) -> ModelSpec:
    if not model.path.startswith(DEMO_SCHEME):
        return model
    return model.model_copy(update={"path": str(materialise(model.path, models))})


def materialise(name: str, models: Path) -> Path:
    """The folder of a packaged model; the conversion writes it whole or not at all, so one that exists is good."""
    from nereus_common.engines.convert import gguf_file, packaged

    model = packaged(name)
    folder = models / model.folder
    if folder.is_dir():
        return folder
    gguf_file(model)
    command = [sys.executable, "-m", "nereus_common.engines.convert", name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        raise DeadlineExceeded(
            f"converting {name} took longer than {_SECONDS:g} s", command=" ".join(command)
        ) from late
    if done.returncode or not folder.is_dir():
        raise ProcessLost(f"converting {name} failed", log="\n".join(done.stderr.splitlines()[-20:]))
    return folder
