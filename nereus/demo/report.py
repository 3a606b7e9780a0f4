"""What a demo found: gathered from the job's events, written as JSON, shown as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from rich.table import Table

from nereus.events import Evaluation, JobEvent, StateChange, StepReport, SyncReport, TransitionChange

POINTS = 100


@dataclass
class DemoReport:
    """Fills as events come. Fractions are 0 to 1, times seconds, sizes bytes."""

    steps: list[StepReport] = field(default_factory=list)
    syncs: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: dict[tuple[str, str], Evaluation] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    transitions: dict[str, TransitionChange] = field(default_factory=dict)
    """The last that was heard of each."""
    commonest_answer: float = 0.0
    wall_seconds: float = 0.0
    peak_memory_bytes: int = 0

    def take(self, event: JobEvent) -> None:
        match event.value:
            case StepReport() as step:
                self.steps.append(step)
                if step.sync:
                    self.syncs.append(step.sync)
            case Evaluation() as found:
                self.evaluations[found.when, found.mode] = found
            case SyncReport() as sync:
                self.syncs.append(dataclasses.asdict(sync))
            case TransitionChange() as change:
                self.transitions[change.transition_id] = change
            case StateChange(plan=plan) if plan is not None:
                self.plan = plan
            case _:
                return

    def taking(self, events: Iterable[JobEvent]) -> Iterable[JobEvent]:
        """The same events, each taken as it passes."""
        for event in events:
            self.take(event)
            yield event

    def to_dict(self) -> dict[str, Any]:
        """The demo's JSON. `heldout_before` and `heldout_after` are sampled at the training temperature."""
        return {
            "heldout_before": self._heldout("before", "sampled"),
            "heldout_after": self._heldout("after", "sampled"),
            "heldout_greedy_before": self._heldout("before", "greedy"),
            "heldout_greedy_after": self._heldout("after", "greedy"),
            "heldout_commonest_answer": self.commonest_answer,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "sync": self._sync(),
            "plan": self.plan,
            "transitions": [dataclasses.asdict(change) for change in self.transitions.values()],
            "wall_seconds": self.wall_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }

    def _heldout(self, when: str, mode: str) -> dict[str, Any] | None:
        found = self.evaluations.get((when, mode))
        return None if found is None else {key: getattr(found, key) for key in ("mean", "low", "high", "n")}

    def _sync(self) -> dict[str, float]:
        """All weight syncs of the job together."""
        return {key: sum(sync[key] for sync in self.syncs) for key in ("bytes_moved", "bytes_needed", "seconds")}


def result_table(report: DemoReport) -> Table:
    """Held-out accuracy before and after, each with its 95% interval, and what the run took."""
    table = Table(title="Held-out accuracy (95% interval)", title_justify="left")
    for heading in ("answers", "before", "after", "gain"):
        table.add_column(heading, overflow="fold")
    for mode in ("sampled", "greedy"):
        before, after = (report.evaluations.get((when, mode)) for when in ("before", "after"))
        if before and after:
            gain = f"{(after.mean - before.mean) * POINTS:+.1f}"
            table.add_row(mode, _interval(before), _interval(after), gain)
    table.add_row("always the commonest", f"{report.commonest_answer:.1%}", "", "")
    return table


def cost_line(report: DemoReport) -> str:
    sync = report.to_dict()["sync"]
    ratio = sync["bytes_moved"] / sync["bytes_needed"] if sync["bytes_needed"] else 1.0
    gaps = [step.logprob_gap_mean for step in report.steps]
    return (
        f"{len(report.steps)} steps, {report.wall_seconds:.0f} s in all, peak memory of all processes "
        f"{report.peak_memory_bytes / (1 << 30):.1f} GiB; log-prob gap {max(gaps, default=0.0):.4f} at most; "
        f"weight syncs {sync['bytes_moved'] / 1e9:.2f} GB (moved/needed {ratio:.2f}) in {sync['seconds']:.1f} s"
    )


def transition_lines(report: DemoReport) -> Iterable[str]:
    """What became of every change of plan."""
    for change in report.transitions.values():
        if change.state != "done":
            yield f"the change of plan after step {change.step} is {change.state}: {change.message}"
            continue
        ratio = change.bytes_moved / change.bytes_needed if change.bytes_needed else 1.0
        yield (
            f"plan changed after step {change.step}: {change.bytes_moved / 1e9:.2f} GB of training state moved "
            f"(moved/needed {ratio:.2f}), the same to the bit by its digest; the job stood still for "
            f"{change.still_seconds:.1f} s{_pace(report, change.step)}"
        )


def _pace(report: DemoReport, since: int) -> str:
    """Mean seconds of a step before version `since` and from it on, without the step in which the plan changed."""
    seconds = {one.step: one.seconds["total"] for one in report.steps}
    early = [took for step, took in seconds.items() if step < since - 1]
    late = [took for step, took in seconds.items() if step >= since]
    return f"; a step took {mean(early):.1f} s before and {mean(late):.1f} s after" if early and late else ""


def _interval(found: Evaluation) -> str:
    return f"{found.mean:.1%} ({found.low:.1%} to {found.high:.1%})"
