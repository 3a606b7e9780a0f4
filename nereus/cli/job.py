"""`nereus job …`: submit, list, get, watch, cancel, resume, samples, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.table import Table

from nereus.cli.export import export
from nereus.cli.options import DataDir, Json, Target
from nereus.cli.output import BAD_INPUT, FAILED, console, notes, print_json, speaks_plainly
from nereus.cli.progress import follow
from nereus.events import JobState
from nereus.types import Job
from nereus_common.core.errors import InvalidInput

if TYPE_CHECKING:
    from nereus.sync import SyncClient

app = typer.Typer(help="Submit and follow jobs.", no_args_is_help=True)
app.command()(export)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


@app.command()
@speaks_plainly
def submit(
    file: Annotated[Path, typer.Argument(help="A job file: .yaml, .toml or .json.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field, as in optimizer.lr=1e-5.")
    ] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="The job's id; submitting twice gives one job.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Start a job."""
    from nereus.spec_file import load_spec
    from nereus.sync import SyncClient

    spec = load_spec(file, overrides(set_ or []))
    with SyncClient.connect(target, data_dir=data_dir) as client:
        job = client.submit(spec, job_id=job_id)
        if not watch:
            print_json({"job_id": job.id}) if as_json else console.print(job.id)
            return
        notes.print(f"job {job.id}")
        follow(job.watch(), console, as_json=as_json)
        _exit_with(job.get())


@app.command("list")
@speaks_plainly
def list_(target: Target = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show all jobs."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        jobs = client.list()
    if as_json:
        print_json(jobs)
        return
    table = Table(box=None)
    for heading in ("job", "state", "steps", "created"):
        table.add_column(heading, overflow="fold")
    for job in jobs:
        created = f"{job.created:%Y-%m-%d %H:%M}" if job.created else ""
        table.add_row(job.id, job.state, str(job.steps_done), created)
    console.print(table)


@app.command()
@speaks_plainly
def get(job_id: JobName, target: Target = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one job."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        job = client.get(job_id)
    if as_json:
        print_json(job)
        return
    table = Table(box=None, show_header=False)
    for name, value in _fields(job).items():
        table.add_row(name, value)
    console.print(table)


@app.command()
@speaks_plainly
def watch(
    job_id: JobName,
    after: Annotated[str, typer.Option(help="Only events after this revision.")] = "",
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Follow a job until it ends; exits with 1 when it failed."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        follow(client.watch(job_id, after=after), console, as_json=as_json)
        _exit_with(client.get(job_id))


@app.command()
@speaks_plainly
def cancel(job_id: JobName, target: Target = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Stop a job and free its devices."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        job = client.cancel(job_id)
    print_json(job) if as_json else console.print(f"{job.id} {job.state}")


@app.command()
@speaks_plainly
def resume(
    job_id: JobName,
    plan: Annotated[Path | None, typer.Option(help="A file with another plan, as under `plan:` in a job file.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps in all.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run an ended job on from its last checkpoint."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        told = _last_revision(client, job_id) if watch else ""
        job = client.resume(job_id, plan=plan, steps=steps)
        if not watch:
            print_json(job) if as_json else console.print(f"{job.id} goes on after step {job.steps_done}")
            return
        follow(client.watch(job_id, after=told), console, as_json=as_json)
        _exit_with(client.get(job_id))


@app.command()
@speaks_plainly
def samples(
    job_id: JobName,
    step: Annotated[int | None, typer.Option(min=1, help="As `nereus job watch` counts; default: the last.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first, instead of highest.")] = False,
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show samples of a step with their rewards."""
    from nereus.cli.samples import show
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        chosen = None if step is None else step - 1
        found = client.samples(job_id, step=chosen, limit=0 if worst else limit)
    if worst:
        found = found[::-1][:limit]
    print_json(found) if as_json else show(found, console)


def overrides(assignments: list[str]) -> dict[str, Any]:
    """`optimizer.learning_rate=1e-5` → a value at a dotted field; values are read as YAML."""
    found = {}
    for text in assignments:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise InvalidInput(f"--set {text!r} is not FIELD=VALUE", remedy="write optimizer.learning_rate=1e-5")
        try:
            found[field] = yaml.safe_load(value)
        except yaml.YAMLError as wrong:
            raise InvalidInput(f"--set {field}: {value!r} cannot be read", field=field) from wrong
    return found


def _last_revision(client: SyncClient, job_id: str) -> str:
    """Of an ended job's events; nothing where it still runs, for whom resuming is refused anyway."""
    if not client.get(job_id).state.ended:
        return ""
    return max((event.revision for event in client.watch(job_id)), key=int, default="")


def _fields(job: Job) -> dict[str, str]:
    shown = {"job": job.id, "state": str(job.state), "steps": str(job.steps_done), "folder": job.folder}
    if job.checkpoint_step:
        shown["checkpoint"] = f"after step {job.checkpoint_step}"
    if job.plan is not None:
        shown["plan"] = "\n".join(f"{name} {stage}" for name, stage in job.plan.stages)
    if job.error_message:
        shown["error"] = f"{job.error_reason}: {job.error_message}"
        shown["log"] = "\n".join(job.error_log)
    return shown


def _exit_with(job: Job) -> None:
    """0 when it succeeded; 2 when its input was to blame, else 1."""
    if job.state is JobState.SUCCEEDED:
        return
    for line in job.error_log:
        notes.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT if job.error_reason.startswith("INVALID") else FAILED)
