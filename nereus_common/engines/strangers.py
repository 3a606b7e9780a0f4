"""What rewards and environments have in common: a stranger's code in a worker process, under limits.

It may raise, return nonsense, hang, take its process down or eat memory. Each of these ends in a JobFailed that says
whose code it was and on what.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus_common.core.errors import DeadlineExceeded, JobFailed, NereusError, ProcessLost, ResourceExhausted
from nereus_common.workers import Worker, WorkerSpec

_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True, slots=True)
class Blame:
    """Whose code it is, where it is, and which limits may be raised; `details` go into the error."""

    who: str
    where: str
    remedy: str
    details: dict[str, object] = field(default_factory=dict)

    def failed(self, what: str, error: NereusError) -> JobFailed:
        log = error.details.get("traceback") or error.details.get("log", "")
        return JobFailed(f"{self.who} {what}, {self.where}", remedy=self.remedy, **{**self.details, "log": log})


def worker_spec(name: str, body: str, config: Any, log_folder: Path) -> WorkerSpec:
    return WorkerSpec(name, body, config, log_folder / f"{name}.log", _ONE_THREAD)


async def ask(worker: Worker, method: str, *args: Any, timeout: float, blame: Blame) -> Any:
    """Call the stranger's code; a JobFailed, raised from what went wrong, is all that comes of a fault.

    Where `fatal` says so, the process is of no use any more.
    """
    try:
        return await worker.call(method, *args, timeout=timeout)
    except DeadlineExceeded as late:
        raise blame.failed(f"did not finish within {timeout:g} s", late) from late
    except NereusError as error:
        raise blame.failed(f"failed: {error.message}", error) from error


def fatal(failure: JobFailed) -> bool:
    """Whether the process hangs, is gone or is out of memory."""
    return isinstance(failure.__cause__, DeadlineExceeded | ProcessLost | ResourceExhausted)


def limit_memory(limit: int) -> None:
    """Let this process, in the child, have at most `limit` bytes of writable private memory; more is a MemoryError.

    RLIMIT_DATA counts heap, anonymous mappings and thread stacks, not the code of libraries nor address space that is
    only reserved, and not shared memory (setrlimit(2), Linux 4.7 and later). It cannot be raised again.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def out_of_memory(what: str) -> ResourceExhausted:
    """What a body raises in place of a MemoryError: the process is then replaced, with all that leaked in it."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return ResourceExhausted(f"{what} needs more than the {limit / (1 << 20):.0f} MiB that its process may have")
