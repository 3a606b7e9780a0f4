"""What a place for metrics is, and what a job says about the places it wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Values = Mapping[str, float]
"""Metric name (docs/metrics.md) → value; nested ones with dots: `seconds.generation`."""


class MetricSink(Protocol):
    """A place that metrics go to. Calls may block and come one at a time.

    `step` is the event's: of a step its number from 0, of an evaluation or a checkpoint the number of finished steps.
    Each time it is the version of the policy that was measured. `time`: seconds since the Unix epoch.
    A place that fails for a reason outside this process raises OSError or a NereusError.
    """

    def write(self, step: int, values: Values, time: float) -> None: ...

    def rewind(self, step: int, time: float) -> None:
        """The job goes on at `step` from a checkpoint: what was measured from there on does not count any more."""

    def close(self) -> None: ...


class WandbOptions(Protocol):
    """The part of a job's file about Weights & Biases."""

    @property
    def project(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def mode(self) -> Literal["online", "offline"]: ...


class SinkOptions(Protocol):
    """The part of a job's file about metrics; `nereus.spec.options.MetricsSpec` is one."""

    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> WandbOptions | None: ...
