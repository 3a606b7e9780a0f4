"""A job's events as they come, one line each, fitted to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from nereus.cli.output import print_json
from nereus.events import (
    Checkpoint,
    Evaluation,
    JobEvent,
    LogLine,
    PlanDecision,
    Restart,
    StateChange,
    StepReport,
    SyncReport,
    TransitionChange,
)

_STAGES = (("generation", "gen"), ("reward", "rew"), ("reference", "ref"), ("training", "train"), ("sync", "sync"))


def follow(events: Iterable[JobEvent], console: Console, *, as_json: bool) -> None:
    """Print events until they end: JSON lines, or text."""
    for event in events:
        if as_json:
            print_json(event, line=True)
        elif (text := line(event)) is not None:
            console.print(text, soft_wrap=True)


def line(event: JobEvent) -> str | None:
    """An event in one line of console markup; None for kinds this version does not know."""
    match event.value:
        case StepReport() as step:
            return _step(step)
        case Evaluation() as found:
            form = ".1%" if found.low >= 0 and found.high <= 1 else ".3f"  # rewards need not be fractions
            return (
                f"[cyan]held-out {found.mode} {found.when}[/] {found.mean:{form}} "
                f"[dim]({found.low:{form}} to {found.high:{form}}, n={found.n})[/]"
            )
        case StateChange() as change:
            reason = f": {escape(change.error_message)}" if change.error_message else ""
            return f"[{_colour(change)}]{change.state}[/]{reason}"
        case SyncReport() as sync:
            return f"[dim]sync of {escape(sync.model)} to version {sync.version}: {_sync(sync)}[/]"
        case Checkpoint() as saved:
            return f"[green]checkpoint[/] after step {saved.step}{_size_and_time(saved)}"
        case Restart() as restart:
            why = escape(f": {restart.message}") if restart.message else ""
            return f"[yellow]attempt {restart.attempt}[/] goes on {_whence(restart)}{why}"
        case TransitionChange() as change:
            return f"[magenta]transition {escape(change.transition_id)}[/] {_change(change)}"
        case PlanDecision() as decision:
            return f"[magenta]decision[/] {_decision(decision)}"
        case LogLine() as log:
            return f"[dim]{log.level}[/] {escape(log.message)}"
        case None:
            return None


def _step(step: StepReport) -> str:
    seconds = " ".join(f"{short} {step.seconds[name]:.1f}" for name, short in _STAGES if step.seconds.get(name))
    return (
        f"[bold]step {step.step + 1}[/] reward {step.reward_mean:.3f} "
        f"gap {step.logprob_gap_mean:.4f} {step.tokens_per_second:.0f} tok/s "
        f"{step.seconds.get('total', 0.0):.1f} s [dim]({seconds})[/]"
    )


def _sync(sync: SyncReport) -> str:
    ratio = sync.bytes_moved / sync.bytes_needed if sync.bytes_needed else 1.0
    return f"{sync.bytes_moved / 1e6:.0f} MB (moved/needed {ratio:.2f}) in {sync.seconds:.2f} s"


def _size_and_time(saved: Checkpoint) -> str:
    if not saved.bytes:
        return ""
    return f" [dim]({saved.bytes / 1e6:.1f} MB in {sum(saved.seconds.values()):.1f} s)[/]"


def _whence(restart: Restart) -> str:
    return f"after step {restart.from_step}" if restart.from_step else "from the beginning"


def _change(change: TransitionChange) -> str:
    if change.message:
        return f"{change.state}: {escape(change.message)}"
    if change.state != "done":
        return change.state
    ratio = change.bytes_moved / change.bytes_needed if change.bytes_needed else 1.0
    return (
        f"done: plan {change.target_plan_id} [dim]({change.bytes_moved / 1e6:.0f} MB, moved/needed {ratio:.2f}, "
        f"in {change.still_seconds:.2f} s)[/]"
    )


def _decision(decision: PlanDecision) -> str:
    why = ", ".join(f"{one['signal']} {one['from']:.3g} to {one['to']:.3g}" for one in decision.drifted)
    now = "cannot go on" if decision.step_seconds is None else f"{decision.step_seconds:.3g} s a step"
    best = next((one for one in decision.targets if one["plan_id"] == decision.taken), None)
    if best is None:
        kept = decision.targets[0]["verdict"] if decision.targets else "no other plan"
        return f"plan {decision.plan_id} stays, {now} [dim]({why or 'first look'}; {kept})[/]"
    does = "moves to" if decision.transition_id else "would move to"
    return (
        f"{does} plan {decision.taken}: {best['step_seconds']:.3g} s a step for {now} [dim]({why or 'first look'})[/]"
    )


def _colour(change: StateChange) -> str:
    return {"failed": "red", "cancelled": "yellow", "succeeded": "green"}.get(change.state, "blue")
