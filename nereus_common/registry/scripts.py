"""The Lua scripts, one file each in `lua/`, and the keys they touch.

Keys of the device pool, leases and the registry's epoch share the hash tag {pool}; keys of one job share {job:ID}. No
script spans two tags, so each runs on one node of a Redis Cluster. Scripts use what Redis 6.2 and Valkey both have.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from nereus_common.core.ids import JobId

DEVICES = "nereus:{pool}:devices"
GRANTS = "nereus:{pool}:grants"
LEASES = "nereus:{pool}:leases"
EPOCH = "nereus:{pool}:epoch"
JOBS = "nereus:{pool}:jobs"
"""The ids of all jobs; each job's record is under its own tag."""


def head(job: JobId) -> str:
    """Hash with what a job has one of: "record", "epoch" (of its plan), "fence", "events" (the last revision)."""
    return f"nereus:{{job:{job}}}:head"


def plans(job: JobId) -> str:
    return f"nereus:{{job:{job}}}:plans"


def transitions(job: JobId) -> str:
    return f"nereus:{{job:{job}}}:transitions"


def units(job: JobId) -> str:
    return f"nereus:{{job:{job}}}:units"


def events(job: JobId) -> str:
    return f"nereus:{{job:{job}}}:events"


@cache
def script(name: str) -> str:
    folder = files(__package__) / "lua"
    return "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
