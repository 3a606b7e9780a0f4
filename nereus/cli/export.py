"""`nereus job export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nereus.cli.options import DataDir, Json, Target
from nereus.cli.output import console, print_json, speaks_plainly
from nereus_common.core.errors import InvalidInput


@speaks_plainly
def export(
    source: Annotated[str, typer.Argument(metavar="JOB|CHECKPOINT", help="A job's id, or a folder of checkpoints.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    model: Annotated[str, typer.Option(help="Which trained model.")] = "actor",
    step: Annotated[int | None, typer.Option(help="After how many steps; default: the newest checkpoint.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the original model's.")] = "",
    target: Target = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write a trained model as a Hugging Face folder."""
    from nereus_common.checkpoints import export as exporting

    done = exporting.export(_checkpoint(source, step, target, data_dir), out, model=model, dtype=dtype)
    if as_json:
        print_json({"folder": str(done.folder), "step": done.step, "dtype": done.dtype, "bytes": done.bytes})
        return
    console.print(f"{done.folder}: {model} after {done.step} steps, {done.dtype}, {done.bytes / 1e6:,.0f} MB")


def _checkpoint(source: str, step: int | None, target: str | None, data_dir: Path | None) -> Path:
    """A checkpoint's folder itself, the one of `step` in a folder of several, or that of a job."""
    from nereus_common.checkpoints.folder import find
    from nereus_common.checkpoints.manifest import MANIFEST

    folder = Path(source)
    if (folder / MANIFEST).is_file():
        if step is not None:
            raise InvalidInput(f"{source} is one checkpoint", remedy="leave --step out", field="step")
        return folder
    return find(folder if folder.is_dir() else _job_root(source, target, data_dir), step)


def _job_root(job_id: str, target: str | None, data_dir: Path | None) -> Path:
    from nereus.spec import JobSpec
    from nereus.sync import SyncClient

    with SyncClient.connect(target, data_dir=data_dir) as client:
        job = client.get(job_id)
    return JobSpec.from_json(job.spec_json).checkpoint.root(job.id, Path(job.folder))
