from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import import_engines


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Four processes that have imported the torch engines."""
    processes = RankProcesses(4)
    try:
        processes.run(import_engines, [()] * 4, timeout=240)
        yield processes
    finally:
        processes.close()
