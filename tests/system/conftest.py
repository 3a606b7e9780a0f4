"""A real cluster for system tests: embedded registry, five services, real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import down
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.sync import SyncClient
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import import_engines
from tests.tiny_models import save_tiny_model

DEVICES = 6
DEVICE_BYTES = 5 << 30


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def tiny_untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterState]:
    """One per module; its end proves that no process and no shared-memory segment is left."""
    config = ClusterConfig(devices={f"cpu{slot}": DEVICE_BYTES for slot in range(DEVICES)})
    folder = ClusterFolder(tmp_path_factory.mktemp("cluster"))
    state = up(folder, config)
    try:
        yield state
    finally:
        down(folder, grace=config.stop_seconds)


@pytest.fixture
def client(cluster: ClusterState) -> Iterator[SyncClient]:
    with SyncClient.connect(cluster.controller) as connected:
        yield connected


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Four processes that have imported the torch engines."""
    processes = RankProcesses(4)
    try:
        processes.run(import_engines, [()] * 4, timeout=240)
        yield processes
    finally:
        processes.close()
