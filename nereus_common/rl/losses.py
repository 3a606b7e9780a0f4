"""Losses by name, as a training engine is told them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.value_loss import ValueLoss

Loss = PolicyLoss | ValueLoss
LOSSES: Mapping[str, type[Loss]] = {"policy": PolicyLoss, "value": ValueLoss}


def make_loss(options: Mapping[str, Any]) -> Loss:
    """The loss that `{"name": "policy", …}` asks for; InvalidInput names an unknown name, option or a wrong value."""
    name = options.get("name")
    if name not in LOSSES:
        raise InvalidInput(f"loss.name is {name!r}", remedy=f"known: {', '.join(sorted(LOSSES))}", field="loss.name")
    kind = LOSSES[str(name)]
    known = {option.name for option in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    given = {key: value for key, value in options.items() if key != "name"}
    for key, value in given.items():
        if key not in known:
            raise InvalidInput(
                f"loss.{key} is unknown to {name}", remedy=f"known: {', '.join(sorted(known))}", field=f"loss.{key}"
            )
        _check(f"loss.{key}", value, hints[key])
    return kind(**given)


def _check(field: str, value: object, hint: Any) -> None:
    """A number, None where the option may be, or one of an option's words."""
    if typing.get_origin(hint) is typing.Literal:
        words = typing.get_args(hint)
        if value not in words:
            raise InvalidInput(f"{field} is {value!r}", remedy=f"one of {', '.join(words)}", field=field)
        return
    if value is None and NoneType in typing.get_args(hint):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{field} is {value!r}, not a number", field=field)
