"""What a user asks for who resumes a job: the changed spec, and whether there is anything left to do. Pure."""

from __future__ import annotations

import json
from typing import Any

from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import JobId


def resumed_spec(spec: JobSpec, plan_json: str, steps: int) -> JobSpec:
    """The spec with another plan ("": the same) and another number of steps (0: the same); InvalidInput names what
    is wrong with them."""
    data: dict[str, Any] = json.loads(spec.to_json())
    if plan_json:
        data["plan"] = _plan(plan_json)
    if steps:
        data["steps"] = steps
    return JobSpec.from_dict(data, origin="resume")


def check_something_is_left(job: JobId, steps: int, done: int, succeeded: bool) -> None:
    """InvalidInput where a job of `steps` steps, whose checkpoint holds `done`, has nothing to run on for.

    A job that failed after its last step may still have to be evaluated.
    """
    if steps < done or (steps == done and succeeded):
        raise InvalidInput(
            f"job {job} has {steps} steps, and its checkpoint holds {done} finished ones",
            remedy=f"ask for more: --steps {done + 1} or above",
            field="steps",
        )


def _plan(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"plan_json is not JSON: {wrong}", field="plan") from wrong
