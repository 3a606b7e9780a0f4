"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str | None,
    typer.Option(
        envvar="NEREUS_TARGET", metavar="HOST:PORT", help="The controller; default: the cluster started here."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(envvar="NEREUS_DATA_DIR", help="The cluster's folder; default: ~/.local/share/nereus."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
