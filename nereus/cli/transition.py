"""`nereus transition …`: show, apply, list, get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nereus import rendering
from nereus.cli import transition_progress
from nereus.cli.options import DataDir, Json, Target
from nereus.cli.output import console, notes, print_json, speaks_plainly
from nereus.cli.targets import FORM, parse_target
from nereus.spec_file import SUFFIXES, load_spec
from nereus_common.core.errors import Conflict

if TYPE_CHECKING:
    from nereus.client import TargetSource
    from nereus.sync import SyncClient

app = typer.Typer(help="Move a running job from one plan to another.", no_args_is_help=True)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
Words = Annotated[list[str], typer.Argument(metavar="TARGET...", help=f"Where to: {FORM}.")]


@app.command()
@speaks_plainly
def show(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A running job's id, or a job file with a plan.")],
    words: Words,
    dot: Annotated[bool, typer.Option("--dot", help="Print a Graphviz graph.")] = False,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline for Perfetto.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GB/S", help="For the timeline's lengths; else as measured, or 1."),
    ] = None,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say what a move would do, without doing it."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        if Path(job).suffix in SUFFIXES:
            spec = load_spec(job)
            shown = client.show_transition(spec, parse_target(words, spec.written_plan))
        else:
            shown = client.show_transition(job, _target(client, job, words))
    if perfetto is not None:
        per_second = rate * 1e9 if rate else rendering.rate_of(shown) or 1e9
        perfetto.write_text(json.dumps(rendering.as_perfetto(shown, per_second)))
        notes.print(f"{perfetto}: lengths predicted at {per_second / 1e9:.3g} GB/s", soft_wrap=True)
    if as_json:
        print_json(shown)
    elif dot:
        console.print(rendering.as_dot(shown), markup=False, soft_wrap=True)
    else:
        console.print(rendering.as_text(shown), markup=False)


@app.command()
@speaks_plainly
def apply(
    job_id: JobName,
    words: Words,
    transition_id: Annotated[str, typer.Option("--id", help="Applying twice under one id gives one.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow it until it has ended.")] = False,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Move a running job at its next safe boundary; with --wait exits with 1 when it did not happen."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        begun = client.apply_transition(job_id, _target(client, job_id, words), transition_id=transition_id)
        if not wait:
            print_json(begun) if as_json else console.print(begun.id)
            return
        states = client.follow_transition(job_id, begun.id)
        if as_json:
            for state in states:
                print_json(state, line=True)
        else:
            transition_progress.follow(states, console)
        last = client.transition(job_id, begun.id)
        if not as_json:
            console.print(rendering.as_text(last), markup=False)
        last.check()


@app.command("list")
@speaks_plainly
def list_(job_id: JobName, target: Target = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the transitions of a job."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        found = client.transitions(job_id)
    if as_json:
        print_json(found)
        return
    table = Table(box=None)
    for heading in ("transition", "state", "step", "to plan", "moved", "seconds"):
        table.add_column(heading, overflow="fold")
    for one in found:
        moved, seconds = f"{one.bytes_moved / rendering.MIB:,.1f} MiB", f"{sum(one.seconds.values()):.1f}"
        step = "" if one.step < 0 else str(one.step)
        table.add_row(one.id, str(one.state), step, one.target.id, moved, seconds)
    console.print(table)


@app.command()
@speaks_plainly
def get(
    job_id: JobName,
    transition_id: Annotated[str, typer.Argument(metavar="ID")],
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show one transition."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        found = client.transition(job_id, transition_id)
    if as_json:
        print_json(found)
        return
    console.print(f"{found.id} {found.state}")
    console.print(rendering.as_text(found), markup=False)


def _target(client: SyncClient, job_id: str, words: list[str]) -> TargetSource:
    plan = client.get(job_id).plan
    if plan is None:
        raise Conflict(f"job {job_id} has no plan yet", remedy="wait until it runs", job=job_id)
    return parse_target(words, plan)
