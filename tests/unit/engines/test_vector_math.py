"""The first call of a vector function is as exact as every other, however many threads make it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROCESSES = 120
"""Without care one process in twenty is wrong about one function or another."""


def storm() -> None:
    """Entry of a process without threads of its own: it forks children that compute at once, each for the first time.

    Prints the name of a function for each child that got it wrong."""
    import numpy as np
    import torch

    from nereus_common.engines.torch_model.vector_math import use_threads

    numbers = (np.arange(50_000) * 0.01 + 1).astype(np.float32)
    right = {name: getattr(np, name)(numbers.astype(np.float64)) for name in ("cos", "sin", "sqrt", "log")}
    given = torch.from_numpy(numbers)

    def wrong() -> str:
        use_threads(2)
        found = {name: getattr(given, name)().numpy() for name in right}
        return " ".join(name for name, want in right.items() if np.abs(found[name] - want).max() > 1e-5)

    for _ in range(PROCESSES):
        if os.fork() == 0:
            print(wrong(), end="", flush=True)
            os._exit(0)
        os.wait()


def test_vector_functions_are_exact_in_the_first_call_of_a_process() -> None:
    root = Path(__file__).parents[3]
    command = "from tests.unit.engines.test_vector_math import storm; storm()"
    ended = subprocess.run(
        [sys.executable, "-c", command], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
