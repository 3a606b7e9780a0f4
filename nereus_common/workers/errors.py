"""What a worker says when its own code failed."""

from __future__ import annotations

from nereus_common.core.errors import NereusError


class WorkerError(NereusError):
    """Code in a worker raised something that is no NereusError: a bug. `details["traceback"]` is the child's."""
