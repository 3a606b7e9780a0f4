"""What every benchmark says about itself: name, machine, commit, command, metrics."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "async-vs-sync": "benchmarks.async_vs_sync",
    "dag": "benchmarks.dag",
    "overlap": "benchmarks.overlap",
    "profile": "benchmarks.profile_step",
    "reshard": "benchmarks.reshard",
    "rl-vs-trl": "benchmarks.rl_vs_trl",
    "step": "benchmarks.step",
    "transport": "benchmarks.transport",
    "weight-sync": "benchmarks.weight_sync",
}
"""Name → module with `run() -> dict`: the metrics. Ratios, errors and rates are fractions."""
TINY = {"async-vs-sync", "dag", "overlap", "profile", "reshard", "rl-vs-trl"}
"""Those whose `run` takes `tiny=True`: a random model and a few steps, which prove that it runs and measure nothing."""


def measure(name: str, command: list[str], *, tiny: bool = False) -> dict[str, Any]:
    """Run one benchmark and return its report."""
    run = importlib.import_module(BENCHMARKS[name]).run
    metrics = run(tiny=True) if tiny else run()
    return {
        "name": name,
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(command),
        "metrics": metrics,
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, and the versions that decide speed."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of this checkout, with `+` behind it when files were changed; empty outside a checkout."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
