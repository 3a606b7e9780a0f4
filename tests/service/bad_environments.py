"""Environments that go wrong, each in its own way; run in environment processes by their path."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from nereus_common.rl.environments import Observation, Task


class Fair:
    """Counts its own steps; shows which process it lives in."""

    def __init__(self, until: int = 2) -> None:
        self._until = until
        self._steps = 0

    def reset(self, task: Task) -> None:
        self._task = task

    def step(self, response: str) -> Observation:
        self._steps += 1
        text = f"{self._task.sample}:{self._steps}:{response}:{os.getpid()}"
        return Observation(text, 0.5, self._steps == self._until)


class Bad(Fair):
    """Fair until it hears the word."""

    def step(self, response: str) -> Observation:
        match response:
            case "raise":
                raise ZeroDivisionError("division by zero")
            case "hang":
                time.sleep(60)
            case "exit":
                os._exit(3)
            case "sys.exit":
                raise SystemExit(4)
            case "later":
                threading.Timer(0.2, os._exit, (5,)).start()
            case "bytes":
                bytearray(4 << 30)
            case "array":
                np.ones(1 << 29)
            case "leak":
                kept = [bytearray(1 << 20) for _ in range(4096)]
                return Observation(str(len(kept)))
        return super().step(response)


class BadReset(Fair):
    def reset(self, task: Task) -> None:
        raise LookupError("no such task")


class BadConstructor(Fair):
    def __init__(self) -> None:
        raise OSError("no licence")


class StepOnly:
    def step(self, response: str) -> Observation:
        return Observation()


def nonsense(history: tuple[str, ...], task: Task) -> Any:
    return {
        "dict": {"text": "hi"},
        "nan": Observation("", float("nan")),
        "bytes": Observation(b"hi"),  # type: ignore[arg-type]
        "done": Observation("", 0.0, 1),  # type: ignore[arg-type]
        "long": Observation("x" * (1 << 21)),
        "half": Observation("\ud800"),
    }[history[-1]]


def parrot(history: tuple[str, ...], task: Task, *, word: str = "again") -> Observation:
    return Observation(f"{word} {len(history)} {' '.join(history)}", 1.0, task.answer == history[-1])


class Slow(Fair):
    def __init__(self, seconds: float = 0.7) -> None:
        super().__init__(until=1)
        self._seconds = seconds

    def step(self, response: str) -> Observation:
        time.sleep(self._seconds)
        return super().step(response)
