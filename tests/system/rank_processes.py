"""Real processes for tests of engines that span ranks, given work many times.

They are forked from a server that has imported the engines, which takes tens of milliseconds where an import takes
seconds: so a test can have processes of its own. It should: a process keeps the threads of every group it was in.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

PRELOADED = [
    "nereus_common.engines.training.worker",
    "nereus_common.engines.inference.worker",
    "tests.system.training_cases",
]


class RankProcesses:
    """`size` processes with one OpenMP thread each; `run` calls one function in the first n of them.

    `spawned`: started anew, with the environment of now, instead of being forked with the first pool's.
    """

    def __init__(self, size: int, *, spawned: bool = False) -> None:
        context = multiprocessing.get_context("spawn" if spawned else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes = []
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OMP_NUM_THREADS", "1")
            for _ in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout: float = 120, first: int = 0
    ) -> list[Any]:
        """`function(*arguments[i])` in process first + i, all at once; the results in order. Raises the first
        error; processes that have not answered by then are lost to later runs."""
        pipes = self._pipes[first : first + len(arguments)]
        for pipe, given in zip(pipes, arguments, strict=True):
            pipe.send((function, given))
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(results) < len(pipes):
            ready = wait([p for i, p in enumerate(pipes) if i not in results], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipes.index(pipe)] = pipe.recv()
                if isinstance(results[pipes.index(pipe)], _Raised):
                    end = min(end, time.monotonic() + 5)
        failures = [outcome for outcome in results.values() if isinstance(outcome, _Raised)]
        if failures:
            raise failures[0].error
        if len(results) < len(pipes):
            raise TimeoutError(f"ranks {sorted(set(range(len(pipes))) - results.keys())} gave no answer")
        return [results[index] for index in range(len(pipes))]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(_Raised(error))
