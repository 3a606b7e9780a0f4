"""Options that cross from a plan or a request to the torch engines; plain values, checked by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from nereus_common.core.errors import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of one model-stage meet; every key begins with `prefix`, so old and new groups never mix."""

    host: str
    port: int
    prefix: str


@dataclass(frozen=True, slots=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2019). Weight decay is for matrices, not for norms and biases."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("beta1", 0, 1), ("beta2", 0, 1), ("eps", 0, 1), ("weight_decay", 0, 1)):
            if not low <= getattr(self, name) < high:
                raise InvalidInput(
                    f"options.optimizer.{name} is {getattr(self, name)}",
                    remedy=f"at least {low} and below {high}",
                    field=f"options.optimizer.{name}",
                )


def parse_options(kind: type[T], given: Mapping[str, Any], where: str = "options") -> T:
    """A frozen dataclass of options from a mapping; InvalidInput names an unknown key or a value of a wrong type."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        field = f"{where}.{key}"
        if key not in hints:
            raise InvalidInput(f"{field} is unknown", remedy=f"known: {', '.join(sorted(hints))}", field=field)
        wanted = hints[key]
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type) and isinstance(value, Mapping):
            values[key] = parse_options(wanted, value, field)
        elif _fits(value, wanted):
            values[key] = wanted(value)
        else:
            raise InvalidInput(f"{field} is {value!r}, not {wanted.__name__}", field=field)
    return kind(**values)


def _fits(value: object, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is wanted
