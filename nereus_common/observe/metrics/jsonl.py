"""metrics.jsonl: a flat JSON object a line, `step`, `time` and the values. It survives restarts of its job."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from nereus_common.observe.metrics.base import Values
from nereus_common.observe.metrics.names import is_before

NAME = "metrics.jsonl"


class JsonLinesSink:
    """A line is in the operating system's hands when `write` returns. What is not finite is null: NaN is no JSON."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / NAME
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values, time: float) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time, **finite}) + "\n")
        self._file.flush()

    def rewind(self, step: int, time: float) -> None:
        """Keep the lines from before `step`, whole or not at all; a line that a crash cut short goes too."""
        self._file.close()
        scratch = self._path.with_suffix(".new")
        with self._path.open(encoding="utf-8") as lines, scratch.open("w", encoding="utf-8") as kept:
            kept.writelines(line for line in lines if _stays(line, step))
            kept.flush()
            os.fsync(kept.fileno())
        scratch.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def _stays(line: str, first_step: int) -> bool:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return False
    return line.endswith("\n") and is_before(values["step"], values, first_step)
