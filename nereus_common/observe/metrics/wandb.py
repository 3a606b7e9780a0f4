"""Weights & Biases, where its package is installed: a job is one run, over its restarts too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus_common.core.errors import InvalidInput, Unavailable
from nereus_common.observe.metrics.base import Values, WandbOptions


class WandbSink:
    """`config` is what the run's page shows as its settings. Unavailable for whatever W&B's client refuses.

    The step is a metric of its own: W&B ignores its built-in step where that goes back, as after a restart.
    """

    def __init__(self, options: WandbOptions, job: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._wandb = wandb_package()
        with self._doing("open the run"):
            self._run = self._wandb.init(
                project=options.project,
                name=options.name or job,
                id=job,
                resume="allow",
                mode=options.mode,
                dir=str(folder),
                config=dict(config),
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values, time: float) -> None:
        with self._doing(f"log step {step}"):
            self._run.log({"step": step, **{name.replace(".", "/"): value for name, value in values.items()}})

    def rewind(self, step: int, time: float) -> None:
        """Nothing: W&B keeps what it was told, and draws the later values of a step over the earlier ones."""

    def close(self) -> None:
        with self._doing("finish the run"):
            self._run.finish()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._wandb.Error as refused:
            raise Unavailable(
                f"Weights & Biases did not {what}: {refused}", remedy="check the network and `wandb login`"
            ) from refused


def wandb_package() -> Any:
    """The module; InvalidInput where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as missing:
        if missing.name != "wandb":
            raise
        raise InvalidInput(
            "the job asks for metrics.wandb, but the package wandb is not installed where its controller runs",
            remedy="run `pip install wandb` there, or leave metrics.wandb out",
            field="metrics.wandb",
        ) from missing
