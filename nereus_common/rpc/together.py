"""Several calls side by side, of which one failure ends all and is raised as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from nereus_common.core.errors import NereusError, ProcessLost, VerificationFailed

Result = TypeVar("Result")

_TELLING = (ProcessLost, VerificationFailed)
"""These explain more than the errors of the peers that then missed each other."""


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order. When a call fails the others are cancelled, and the error that explains most is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    return [task.result() for task in running]


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """A lost process or a failed verification before other errors of ours, those before anything else."""
    flat = list(leaves(group))
    for kind in (*_TELLING, NereusError):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
