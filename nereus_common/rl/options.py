"""Values built from the options that a job or a wire message gives by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar

from nereus_common.core.errors import InvalidInput

T = TypeVar("T")


def by_name(kinds: Mapping[str, type[T]], options: Mapping[str, Any], where: str) -> T:
    """The dataclass of `kinds` that `{"name": …, …}` asks for.

    InvalidInput names an unknown name, an unknown option or a value of the wrong kind, as a field of `where`.
    """
    name = str(options.get("name"))
    if name not in kinds:
        raise InvalidInput(
            f"{where}.name is {options.get('name')!r}",
            remedy=f"known: {', '.join(sorted(kinds))}",
            field=f"{where}.name",
        )
    kind = kinds[name]
    hints = typing.get_type_hints(kind)
    known = sorted(option.name for option in dataclasses.fields(kind))  # type: ignore[arg-type]
    given = {key: value for key, value in options.items() if key != "name"}
    for key, value in given.items():
        field = f"{where}.{key}"
        if key not in known:
            raise InvalidInput(f"{field} is unknown to {name}", remedy=f"known: {', '.join(known)}", field=field)
        check(field, value, hints[key])
    return kind(**given)


def check(field: str, value: object, hint: Any) -> None:
    """InvalidInput unless `value` is what `hint` allows: a number, a truth value, one of several words, or None."""
    if typing.get_origin(hint) is typing.Literal:
        words = typing.get_args(hint)
        if value not in words:
            raise InvalidInput(f"{field} is {value!r}", remedy=f"one of {', '.join(words)}", field=field)
    elif hint is bool:
        if not isinstance(value, bool):
            raise InvalidInput(f"{field} is {value!r}, neither true nor false", field=field)
    elif value is None and NoneType in typing.get_args(hint):
        return
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{field} is {value!r}, not a number", field=field)


def bounded(
    field: str,
    value: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> None:
    """InvalidInput when an option lies outside; NaN does."""
    if at_least is not None and not value >= at_least:
        raise InvalidInput(f"{field} is {value}", remedy=f"at least {at_least}", field=field)
    if at_most is not None and not value <= at_most:
        raise InvalidInput(f"{field} is {value}", remedy=f"at most {at_most}", field=field)
    if above is not None and not value > above:
        raise InvalidInput(f"{field} is {value}", remedy=f"above {above}, or null", field=field)
