"""How the command speaks: tables for people, JSON for scripts, one clear line on stderr for errors."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console

from nereus_common.core.errors import InvalidInput, NereusError, NotFound

INTERRUPTED = 130
BAD_INPUT = 2
FAILED = 1

P = ParamSpec("P")
T = TypeVar("T")

console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)
"""Progress and remarks, so that stdout holds only the result."""


def plain(value: Any) -> Any:
    """A value as JSON can hold it: dataclasses become objects, times ISO 8601."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value.isoformat() if isinstance(value, datetime) else value


def print_json(value: Any, *, line: bool = False) -> None:
    """To stdout; on one line for streams."""
    sys.stdout.write(json.dumps(plain(value), indent=None if line else 2) + "\n")
    sys.stdout.flush()


def fail(error: NereusError) -> NoReturn:
    """Say what is wrong and what to do; exit with 2 when the input is to blame, else with 1."""
    for line in str(error).splitlines():
        notes.print(f"nereus: {line}", style="red", markup=False, soft_wrap=True)
    if log := error.details.get("log"):
        notes.print("the log ended with:", style="dim")
        for line in log.splitlines():
            notes.print(f"  {line}", style="dim", markup=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT if isinstance(error, InvalidInput | NotFound) else FAILED)


def speaks_plainly(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose NereusErrors end it with a line instead of a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except NereusError as error:
            fail(error)
        except KeyboardInterrupt:
            notes.print("nereus: interrupted", style="red")
            raise typer.Exit(INTERRUPTED) from None

    return run
