"""The errors of a pull, worded once for every transport: who waited for whom, in which transition."""

from __future__ import annotations

from nereus_common.core.errors import DeadlineExceeded, Unavailable
from nereus_common.core.transfer import RankRef
from nereus_common.transport.base import PullRequest


def deadline_exceeded(request: PullRequest, sources: str, seconds: float) -> DeadlineExceeded:
    """`sources` did not deliver within `seconds`."""
    return DeadlineExceeded(
        f"transition {request.transition}: waited {seconds:.3g} s for version {request.version} from {sources}",
        remedy="see whether the source lives and its process is scheduled, or give the pull more time",
        source=sources,
        transition=request.transition,
    )


def unavailable(request: PullRequest, source: RankRef, problem: str) -> Unavailable:
    """`source` cannot be reached or went away."""
    return Unavailable(
        f"transition {request.transition}: {source} cannot serve version {request.version}: {problem}",
        remedy="pull from another holder, or see why its process ended",
        source=source,
        transition=request.transition,
    )
