"""All places that a job's metrics go to, behind one call. None of them can stop the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nereus_common.core.errors import NereusError
from nereus_common.observe.metrics.base import MetricSink, SinkOptions, Values
from nereus_common.observe.metrics.jsonl import NAME, JsonLinesSink
from nereus_common.observe.metrics.names import values_of
from nereus_common.observe.metrics.prometheus import JobMetrics
from nereus_common.observe.metrics.wandb import WandbSink, wandb_package

log = logging.getLogger(__name__)

OUTSIDE = (OSError, NereusError)
"""What a place that fails raises: its disk is full, its server is gone. Everything else is a bug, and propagates."""


class MetricSinks:
    """Writes to each of `sinks`, by name. One that fails is told once, in the log, and left out from then on.

    Calls may block (disks, W&B's client): an event loop makes them in a thread, one after another.
    """

    def __init__(self, job: str, sinks: Mapping[str, MetricSink]) -> None:
        self._job = job
        self._sinks = dict(sinks)

    @property
    def names(self) -> tuple[str, ...]:
        """The places that are still written to."""
        return tuple(self._sinks)

    def event(self, kind: str, payload: Mapping[str, Any], time: float) -> None:
        """Take an event of the job (docs/events.md): `restart` rewinds to its `from_step`, others are written, or
        ignored where they hold no metrics."""
        if kind == "restart":
            self.rewind(int(payload["from_step"]), time)
        elif values := values_of(kind, payload):
            self.write(int(payload["step"]), values, time)

    def write(self, step: int, values: Values, time: float) -> None:
        self._each(lambda sink: sink.write(step, values, time))

    def rewind(self, step: int, time: float) -> None:
        self._each(lambda sink: sink.rewind(step, time))

    def close(self) -> None:
        """Close all places; nothing is written any more."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, act: Callable[[MetricSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                act(sink)
            except OUTSIDE as why:
                log.error("metrics of job %s go to %s no longer: %s", self._job, name, why)
                del self._sinks[name]
                with suppress(*OUTSIDE):  # it has failed already; this frees what it holds
                    sink.close()


def open_sinks(
    options: SinkOptions,
    folder: Path,
    job: str,
    *,
    time: float,
    series: JobMetrics | None = None,
    config: Mapping[str, Any] | None = None,
) -> MetricSinks:
    """The places that a job asks for; metrics.jsonl in `folder` always, Prometheus where this process has `series`.

    `time`: now, in seconds since the Unix epoch. `config`: the job's settings, for W&B's page. A job that goes on
    rewinds its sinks first. A place that cannot be opened is left out like one that fails later. InvalidInput when W&B
    is asked for and its package is missing.
    """
    makers: dict[str, Callable[[], MetricSink]] = {NAME: lambda: JsonLinesSink(folder)}
    if series is not None:
        makers["prometheus"] = lambda: series.of_job(job)
    if options.tensorboard:
        makers["tensorboard"] = lambda: _tensorboard(folder, time)
    if (wandb := options.wandb) is not None:
        wandb_package()
        makers["wandb"] = lambda: WandbSink(wandb, job, folder, config or {})
    sinks: dict[str, MetricSink] = {}
    for name, make in makers.items():
        try:
            sinks[name] = make()
        except OUTSIDE as why:
            log.error("metrics of job %s do not go to %s: %s", job, name, why)
    return MetricSinks(job, sinks)


def _tensorboard(folder: Path, time: float) -> MetricSink:
    from nereus_common.observe.metrics.tensorboard import TensorBoardSink  # loads numpy's and protobuf's parts late

    return TensorBoardSink(folder, time)
