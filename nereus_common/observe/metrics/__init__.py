"""Metrics of jobs: numbers by step, written to every place that a job asks for."""

from nereus_common.observe.metrics.base import MetricSink, SinkOptions, Values, WandbOptions
from nereus_common.observe.metrics.names import flatten, values_of
from nereus_common.observe.metrics.page import MetricsPage, metrics_page
from nereus_common.observe.metrics.prometheus import JobMetrics
from nereus_common.observe.metrics.sinks import MetricSinks, open_sinks

__all__ = [
    "JobMetrics",
    "MetricSink",
    "MetricSinks",
    "MetricsPage",
    "SinkOptions",
    "Values",
    "WandbOptions",
    "flatten",
    "metrics_page",
    "open_sinks",
    "values_of",
]
