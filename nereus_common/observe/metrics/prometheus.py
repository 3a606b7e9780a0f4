"""Metrics of jobs for Prometheus: what a controller's page shows while jobs run."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from nereus_common.observe.metrics.base import Values
from nereus_common.observe.metrics.names import CHECKPOINT, PHASE, TRANSITION

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""Upper bounds in seconds: a phase takes from a fraction of a second to most of an hour."""
OUTCOMES = ("done", "failed")


class JobMetrics:
    """The series of all jobs of this process, in `registry`; one object for each registry.

    Every metric of a job's last event is `nereus_job_metric{job, name}`: names come from jobs (rewards, phases), so
    they are labels and not metrics.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.last = Gauge("nereus_job_metric", "Last value of a job's metric.", ("job", "name"), registry=registry)
        self.step = Gauge("nereus_job_step", "Step of the last values.", ("job",), registry=registry)
        self.time = Gauge("nereus_job_updated_seconds", "Unix time of the last values.", ("job",), registry=registry)
        self.steps = Counter("nereus_job_steps", "Finished steps.", ("job",), registry=registry)
        self.tokens = Counter("nereus_job_tokens", "Sampled response tokens.", ("job",), registry=registry)
        self.checkpoints = Counter("nereus_job_checkpoints", "Complete checkpoints.", ("job",), registry=registry)
        self.restarts = Counter("nereus_job_restarts", "Restarts from a checkpoint.", ("job",), registry=registry)
        self.transitions = Counter(
            "nereus_job_transitions", "Changes of plan that ran.", ("job", "outcome"), registry=registry
        )
        self.transition_seconds = Histogram(
            "nereus_job_transition_seconds",
            "Seconds of a change of plan.",
            ("job", "phase"),
            registry=registry,
            buckets=BUCKETS,
        )
        self.seconds = Histogram(
            "nereus_job_step_seconds", "Seconds of a step.", ("job", "phase"), registry=registry, buckets=BUCKETS
        )

    def of_job(self, job: str) -> PrometheusSink:
        """The sink of one job. Its counters start at 0 now, so that their first increase is seen as one."""
        for counter in (self.steps, self.tokens, self.checkpoints, self.restarts):
            counter.labels(job)
        for outcome in OUTCOMES:
            self.transitions.labels(job, outcome)
        return PrometheusSink(self, job)

    def remove(self, job: str) -> None:
        """Take all series of a job off the page."""
        for series in vars(self).values():
            series.remove_by_labels({"job": job})


class PrometheusSink:
    """One job's series. `close` removes them: a job that has ended is not a job that stands still."""

    def __init__(self, metrics: JobMetrics, job: str) -> None:
        self._metrics = metrics
        self._job = job

    def write(self, step: int, values: Values, time: float) -> None:
        metrics, job = self._metrics, self._job
        metrics.step.labels(job).set(step)
        metrics.time.labels(job).set(time)
        for name, value in values.items():
            metrics.last.labels(job, name).set(value)
            if name.startswith(PHASE):
                metrics.seconds.labels(job, name.removeprefix(PHASE)).observe(value)
            if name.startswith(f"{TRANSITION}{PHASE}"):
                phase = name.removeprefix(f"{TRANSITION}{PHASE}")
                metrics.transition_seconds.labels(job, phase).observe(value)
        if f"{PHASE}total" in values:
            metrics.steps.labels(job).inc()
            metrics.tokens.labels(job).inc(values.get("tokens", 0.0))
        if any(name.startswith(CHECKPOINT) for name in values):
            metrics.checkpoints.labels(job).inc()
        if (done := values.get(f"{TRANSITION}done")) is not None:
            metrics.transitions.labels(job, OUTCOMES[done == 0]).inc()

    def rewind(self, step: int, time: float) -> None:
        """Counters count work, not progress: a step that is done twice counts twice."""
        self._metrics.restarts.labels(self._job).inc()

    def close(self) -> None:
        self._metrics.remove(self._job)
