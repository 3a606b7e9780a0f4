"""The samples that a job recorded: `samples/step-00000003.jsonl` in its folder, one JSON object per line.

The number is the step's, from 0, as in the job's `step` events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_common.core.errors import NotFound
from nereus_common.core.ids import JobId

LAST = -1
"""In place of a step: the last one that has any."""
_NAME = re.compile(r"step-(\d{8})\.jsonl")


def read_samples(job: JobId, folder: Path, step: int, limit: int) -> Sequence[Mapping[str, Any]]:
    """Up to `limit` (0: all) samples of a step, best reward first, each with its `step`. NotFound says which exist."""
    known = _recorded_steps(folder)
    wanted = known[-1] if step == LAST and known else step
    if wanted not in known:
        raise NotFound(
            f"job {job} has no recorded samples" + ("" if step == LAST else f" of step {step}"),
            remedy=_which_exist(known),
            job=job,
        )
    lines = (folder / f"step-{wanted:08}.jsonl").read_text().splitlines()
    found = [{"step": wanted, **json.loads(line)} for line in lines]
    found.sort(key=lambda sample: -sample["reward"])
    return found[: limit or None]


def _recorded_steps(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.jsonl"))
    return sorted(int(name[1]) for name in names if name is not None)


def _which_exist(known: Sequence[int]) -> str:
    if not known:
        return "it has finished no step yet, or rollouts.samples is 0"
    return f"{len(known)} steps have some, from step {known[0]} to step {known[-1]}"
