"""What a child process finds in its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

MARK = "NEREUS_WORKER_MARK"


def environment(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """This process's, with `env`. As multiprocessing does: the child finds the modules that the parent finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env, MARK: mark}
