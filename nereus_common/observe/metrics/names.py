"""From the events of a job to named numbers. docs/metrics.md has the names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

EVALUATION = "evaluation."
CHECKPOINT = "checkpoint."
TRANSITION = "transition."
PHASE = "seconds."
_DONE = "done"
_OUTCOMES = (_DONE, "undone", "lost")


def flatten(payload: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a payload; nested names are joined with dots, and what is no number is left out."""
    return dict(_numbers(payload, prefix))


def _numbers(payload: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in payload.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


def values_of(kind: str, payload: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that an event holds: a step's, an evaluation's, a checkpoint's, and those of a transition that ran
    and has ended. Others hold none."""
    match kind:
        case "step":
            return _of_step(payload)
        case "evaluation":
            numbers = {key: payload[key] for key in ("mean", "low", "high", "n")}
            return flatten(numbers, f"{EVALUATION}{payload['mode']}.")
        case "checkpoint":
            return flatten(payload, CHECKPOINT)
        case "transition" if payload["state"] in _OUTCOMES and payload["step"] >= 0:
            told = {key: payload[key] for key in ("epoch", "bytes_moved", "bytes_needed", "seconds")}
            return flatten({"done": payload["state"] == _DONE, **told}, TRANSITION)
        case _:
            return {}


def _of_step(payload: Mapping[str, Any]) -> dict[str, float]:
    """`tokens_per_second`: sampled tokens over the whole step's seconds."""
    values = flatten({key: value for key, value in payload.items() if key != "step"})
    total = values.get(f"{PHASE}total", 0.0)
    return values | ({"tokens_per_second": values["tokens"] / total} if total and "tokens" in values else {})


def is_before(step: int, names: Iterable[str], first_step: int) -> bool:
    """Whether values of `step` were measured before a job that goes on at `first_step` does its first step.

    An evaluation, a checkpoint or a transition of `first_step` is of the very state that it goes on from.
    """
    of_state = any(name.startswith((EVALUATION, CHECKPOINT, TRANSITION)) for name in names)
    return step < first_step or (step == first_step and of_state)
