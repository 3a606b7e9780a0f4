"""The spec of a resumed job, and whether there is anything left to do."""

from __future__ import annotations

import pytest
from nereus_controller.resuming import check_something_is_left, resumed_spec

from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, JobId
from nereus_common.planning.default import default_plan

pytestmark = pytest.mark.fast

SPEC = JobSpec.from_dict({"model": "/m", "prompts": {"task": "gcd"}, "rewards": ["exact_answer"], "steps": 8})
DEVICES = [DeviceId("node0", f"cpu{slot}") for slot in range(2)]
JOB = JobId("j")


def test_nothing_asked_for_changes_nothing() -> None:
    assert resumed_spec(SPEC, "", 0) == SPEC


def test_plan_and_steps_are_replaced_and_nothing_else() -> None:
    plan = default_plan(DEVICES, SPEC.model_stages)
    changed = resumed_spec(SPEC, plan.to_json(), 12)
    assert (changed.explicit_plan, changed.steps) == (plan, 12)
    assert changed.model_copy(update={"plan": SPEC.plan, "steps": SPEC.steps}) == SPEC


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (default_plan(DEVICES[:1], SPEC.model_stages[:1]).to_json(), "the plan has no actor/training"),
        ("{", "plan_json is not JSON"),
        ('{"stages": {}, "stagse": {}}', "did you mean stages|stagse"),
    ],
)
def test_a_plan_that_the_job_cannot_have_is_refused(plan: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        resumed_spec(SPEC, plan, 0)


@pytest.mark.parametrize(
    ("steps", "done", "succeeded", "left"),
    [(8, 4, True, True), (8, 8, True, False), (8, 8, False, True), (7, 8, False, False), (9, 8, True, True)],
)
def test_a_job_is_resumed_only_where_something_is_left_to_do(
    steps: int, done: int, succeeded: bool, left: bool
) -> None:
    if left:
        check_something_is_left(JOB, steps, done, succeeded)
        return
    with pytest.raises(InvalidInput, match="--steps 9 or above"):
        check_something_is_left(JOB, steps, done, succeeded)
