"""`nereus plan`: the best plans for a job on a cluster that need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nereus.cli.options import DataDir, Json
from nereus.cli.output import console, print_json, speaks_plainly
from nereus.cluster.config import default_data_dir
from nereus.cluster_file import load_cluster
from nereus.models import with_local_models
from nereus.spec_file import load_spec
from nereus.what_if import PROMPT_TOKENS, Asked, Lengths, ask, worst_rank
from nereus_common.core.plan import plan_to_dict
from nereus_common.planning.hardware import GB
from nereus_common.planning.question import Found, Searched

DEFAULT_TOP = 3


@speaks_plainly
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file.")],
    cluster: Annotated[str, typer.Option(metavar="FILE|KINDxNODES", help="A cluster file, or h100x4.")],
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Use only so many devices.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of prompt and response; default: the job's longest.")
    ] = None,
    prompt_len: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt.")] = PROMPT_TOKENS,
    top: Annotated[int, typer.Option(min=1, max=20, metavar="K", help="How many plans to show.")] = DEFAULT_TOP,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say which plan would be best for a job, how long a step would take and what fills the devices."""
    spec = with_local_models(load_spec(job), (data_dir or default_data_dir()) / "models")
    sequence = prompt_len + spec.sampling.max_tokens if seq_len is None else seq_len
    asked = ask(spec, load_cluster(cluster), Lengths(prompt_len, sequence), gpus)
    found = asked.answer(top)
    if as_json:
        print_json(_as_dict(asked, found))
        return
    for line in _lines(asked, found):
        console.print(line, markup=False, soft_wrap=True)


def _lines(asked: Asked, searched: Searched) -> Iterator[str]:
    """No line is wider than 80 columns for names of usual length."""
    lengths, best = asked.lengths, searched.found[0].cost.seconds
    yield f"sequences of {lengths.sequence} tokens, prompts of {lengths.prompt}; {asked.sequences} a step"
    yield "nothing is measured: seconds are a third of nominal peaks, good to compare with"
    for number, found in enumerate(searched.found, 1):
        yield ""
        yield f"{number}. {found.cost.seconds:.3g} s a step, {_rate(asked, found):,.0f} tokens/s" + (
            f" ({found.cost.seconds / best - 1:.1%} slower)" if number > 1 else ""
        )
        yield from _stage_lines(asked, found)
        yield from _time_lines(found)


def _stage_lines(asked: Asked, found: Found) -> Iterator[str]:
    for name, stage in found.plan.stages:
        needs = worst_rank(found.plan, asked.question.job.shapes, name)
        size, part = max((size, part) for part, size in needs.parts.items())
        largest = f"{needs.total / GB:.1f} GB, {size / needs.total:.0%} {part.replace('_', ' ')}"
        yield f"   {name!s:<20} {stage!s:<16} {_where(stage.devices):<14} {largest}"
    for group in found.plan.colocated:
        yield f"   take turns: {', '.join(map(str, group))}"


def _where(devices: tuple[Any, ...]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]} +{len(devices) - 1}"


def _time_lines(found: Found) -> Iterator[str]:
    """Where the step's time goes, the longest first."""
    tasks = sorted(found.cost.tasks.items(), key=lambda entry: -entry[1].seconds)
    told = (f"{name} {task.seconds:.3g} s ({_limit(found, name)})" for name, task in tasks if task.seconds)
    yield "   " + ";\n   ".join(told)


def _limit(found: Found, task: str) -> str:
    """The class of operations that takes the most of a task."""
    nominal = found.cost.nominal[task]
    name = max(nominal, key=lambda one: nominal[one])
    return f"{nominal[name] / sum(nominal.values()):.0%} {name.partition('.')[2]}"


def _rate(asked: Asked, found: Found) -> float:
    return asked.sequences * asked.lengths.sequence / found.cost.seconds


def _as_dict(asked: Asked, searched: Searched) -> dict[str, Any]:
    """Bytes of the fullest rank of each model-stage by what they are for, seconds by task."""
    return {
        "sequence_tokens": asked.lengths.sequence,
        "prompt_tokens": asked.lengths.prompt,
        "measured": False,
        "placements": searched.space,
        "plans": [
            {
                "step_seconds": found.cost.seconds,
                "tokens_per_second": _rate(asked, found),
                "confidence": found.cost.confidence,
                "seconds": {name: task.seconds for name, task in found.cost.tasks.items()},
                "nominal_seconds": found.cost.nominal,
                "bytes": {
                    str(name): worst_rank(found.plan, asked.question.job.shapes, name).parts
                    for name in found.plan.names
                },
                "plan": plan_to_dict(found.plan),
            }
            for found in searched.found
        ],
    }
