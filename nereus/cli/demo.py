"""`nereus demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nereus.cli.cluster import say
from nereus.cli.options import DataDir
from nereus.cli.output import console, notes, speaks_plainly
from nereus.cluster.config import default_data_dir, load_cluster_config
from nereus.events import JobEvent


@speaks_plainly
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="RL steps.")] = 16,
    task: Annotated[str, typer.Option(help="letter_counting or gcd.")] = "letter_counting",
    heldout: Annotated[int, typer.Option(min=1, help="Held-out questions.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, order and sampling.")] = 0,
    config: Annotated[Path | None, typer.Option(help="A cluster config (YAML).")] = None,
    data_dir: DataDir = None,
) -> None:
    """Train a small model on this machine, and measure it before and after."""
    from nereus.cli.progress import line
    from nereus.demo.report import cost_line, result_table, transition_lines
    from nereus.demo.run import DemoOptions, demo_folder, run_demo

    def show(event: JobEvent) -> None:
        if (text := line(event)) is not None:
            console.print(text, soft_wrap=True)

    report = run_demo(
        demo_folder(data_dir or default_data_dir()),
        load_cluster_config(config),
        DemoOptions(task, steps, seed, heldout),
        say=say,
        show=show,
    )
    console.print(result_table(report))
    for text in (cost_line(report), *transition_lines(report)):
        console.print(text, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        notes.print(f"results are in {json_file}")
