"""Logs: one JSON object a line into files, readable lines on a terminal, each with what it is about.

`about(job="demo", step="3")` names the job, step, transition or unit that the code inside works for. The names follow
tasks, calls between services and calls into workers; every line logged inside carries them.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

SUBJECTS = ("job", "step", "transition", "unit")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_subject: ContextVar[Mapping[str, str]] = ContextVar("nereus_subject", default=_NOTHING)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def subject() -> Mapping[str, str]:
    """What the running code works for, by subject name."""
    return _subject.get()


@contextmanager
def about(**names: object) -> Iterator[None]:
    """Add names to what the code inside works for; a name other than SUBJECTS is a ValueError.

    Not around a `yield` of an async generator: another task may be the one that closes it.
    """
    token = _add(names)
    try:
        yield
    finally:
        _subject.reset(token)


def about_from_here(**names: object) -> None:
    """As `about`, up to the end of the running task."""
    _add(names)


def _add(names: Mapping[str, object]) -> Token[Mapping[str, str]]:
    unknown = names.keys() - set(SUBJECTS)
    if unknown:
        raise ValueError(f"logs are about {', '.join(SUBJECTS)}, not {', '.join(sorted(unknown))}")
    return _subject.set({**_subject.get(), **{name: str(value) for name, value in names.items()}})


class JsonLines(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message, process, subjects, `extra` fields, error (a traceback)."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **subject(),
            **_extra(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Readable(logging.Formatter):
    """`12:00:01 warning generation: message  job=demo step=3`, tracebacks below."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        facts = " ".join(f"{name}={value}" for name, value in {**subject(), **_extra(record)}.items())
        text = f"{clock} {record.levelname.lower():7} {self._process}: {record.getMessage()}"
        text = f"{text}  {facts}" if facts else text
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(
    process: str,
    *,
    file: Path | None = None,
    stream: TextIO | None = None,
    readable: bool | None = None,
    level: int = logging.INFO,
) -> None:
    """Send all logs of this process to `file` as JSON lines, and to `stream` (default stderr).

    The stream gets readable lines where it is a terminal, JSON lines where it is not, unless `readable` decides.
    Replaces earlier handlers.
    """
    out = sys.stderr if stream is None else stream
    console = logging.StreamHandler(out)
    console.setFormatter(Readable(process) if (out.isatty() if readable is None else readable) else JsonLines(process))
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = logging.FileHandler(file, encoding="utf-8")
        lines.setFormatter(JsonLines(process))
        handlers.append(lines)
    logging.basicConfig(level=level, handlers=handlers, force=True)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
