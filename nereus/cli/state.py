"""`nereus state …`: what a model-stage holds."""

from __future__ import annotations

from typing import Annotated

import typer

from nereus.cli.options import DataDir, Json, Target
from nereus.cli.output import console, print_json, speaks_plainly

app = typer.Typer(help="Look at the state that a running job holds.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at the state that a running job holds."""


@app.command()
@speaks_plainly
def digest(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    model_stage: Annotated[str, typer.Argument(metavar="MODEL/STAGE", help="As in actor/training.")],
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Print the digest of a model-stage's logical state: the same for every layout that holds the same bits."""
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        found = client.state_digest(job_id, model_stage)
    digests = {kind: f"{value:016x}" for kind, value in found.digests.items()}
    if as_json:
        print_json({"version": found.version, "digests": digests})
        return
    console.print(f"version {found.version}")
    for kind, text in digests.items():
        console.print(f"{kind:<11} {text}")
