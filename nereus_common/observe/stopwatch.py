"""Wall seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """`seconds` so far, by phase; `current`: the phase that was begun last."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict(seconds or {})
        self.current = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as `name`, however it ends."""
        self.current, started = name, time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
