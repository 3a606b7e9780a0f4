"""A process's memory as the kernel counts it."""

from __future__ import annotations

from nereus_common.core.errors import ProcessLost
from nereus_common.workers.processes import PROC


def pss_bytes(pid: int) -> int:
    """Proportional set size: a page that k processes share counts as 1/k in each, so sums over processes are what the
    machine really gives up. ProcessLost where the process is gone; PermissionError where it is another user's."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError) as gone:
        raise ProcessLost(f"process {pid} is gone: its memory cannot be measured", pid=pid) from gone
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) << 10
