"""Plans that a job is to move to while it runs, as its file or a user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus.spec.section import PositiveInt, Section
from nereus_common.core.plan import Plan, plan_from_dict, plan_to_dict


class MoveSpec(Section):
    """After `after_step` finished steps the job changes its plan. `plan`: what is other then; the rest stays."""

    after_step: PositiveInt
    plan: dict[str, Any]


def merge_target(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """`plan` with the fields of `given`, which has the form of a job file's `plan`, in whole or in part.

    InvalidPlan names the field that is unknown or wrong.
    """
    return plan_from_dict(_merged(plan_to_dict(plan), given))


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {**old, **new}
    nested = (key for key in new if isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping))
    return {**both, **{key: _merged(old[key], new[key]) for key in nested}}
