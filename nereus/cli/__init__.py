"""The `nereus` command."""

from __future__ import annotations

import typer


def build() -> typer.Typer:
    from nereus.cli import cluster, demo, doctor, job, plan, state, transition

    app = typer.Typer(
        help="Nereus: RL post-training of language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(cluster.up)
    app.command()(cluster.down)
    app.command()(cluster.status)
    app.command()(doctor.doctor)
    app.command()(demo.demo)
    app.command()(plan.plan)
    app.add_typer(job.app, name="job")
    app.add_typer(transition.app, name="transition")
    app.add_typer(state.app, name="state")
    return app


def main() -> None:
    build()()
