"""A mirror keeps the last two versions of a rank, whatever happens while it takes a third."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from nereus_common.core.errors import NereusError, StaleVersion
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef, state_holder
from nereus_common.engines.training.mirror import MirrorConfig, MirroredTensor, MirrorWorker
from nereus_common.state.digest import digest_box
from nereus_common.transport import PullItem, PullRequest, Raw, Transport, open_transport

pytestmark = pytest.mark.fast

WEIGHT, STEP = TensorName("w"), TensorName("w:step")
SHAPE, BOX = (4, 6), Box((0, 2), (4, 6))
TENSORS = {
    WEIGHT: MirroredTensor("parameters", SHAPE, BOX, owned=True),
    STEP: MirroredTensor("step", (), Box((), ()), owned=False),
}
OFFERED = RankRef(state_holder("u"), 1)


@pytest.fixture
def rank() -> Iterator[Transport]:
    transport = open_transport("loopback")
    yield transport
    transport.close()


@pytest.fixture
def mirror() -> Iterator[MirrorWorker]:
    worker = MirrorWorker(MirrorConfig("u", 1, "loopback"))
    worker.keep(TENSORS)
    yield worker
    worker.close()


def weight(version: int) -> NDArray[np.float32]:
    return np.full(BOX.shape, version + 0.5, np.float32)


def train(rank: Transport, version: int) -> None:
    step = np.array(version, np.float32)
    rank.publish(OFFERED, version, {WEIGHT: [(BOX, weight(version))], STEP: [(Box((), ()), step)]})


def take(mirror: MirrorWorker, rank: Transport, version: int, timeout: float = 5.0) -> int:
    return mirror.copy(version, rank.address, "t", timeout).bytes


def given(mirror: MirrorWorker, version: int) -> NDArray[np.float32]:
    """What another unit pulls from it."""
    held = mirror.offer(version)
    found = np.zeros(BOX.shape, np.float32)

    def put(tensor: TensorName, box: Box, data: Raw) -> None:
        found[box.relative_to(BOX).slices] = data.view(np.float32).reshape(box.shape)

    reader = open_transport("loopback")
    items = (PullItem(WEIGHT, BOX, OFFERED, held.address),)
    reader.pull(PullRequest(version, items, 4, 5.0, "t", "float32"), put)
    reader.close()
    return found


def test_it_gives_the_last_two_versions_and_no_other(mirror: MirrorWorker, rank: Transport) -> None:
    for version in range(4):
        train(rank, version)
        assert take(mirror, rank, version) == 4 * (BOX.elements + 1)
        assert take(mirror, rank, version) == 0, "it has that one already"
    assert mirror.versions() == [2, 3]
    for version in (3, 2):
        assert (given(mirror, version) == weight(version)).all()
        assert mirror.digest_state(version) == {
            "parameters": digest_box(WEIGHT, SHAPE, BOX, weight(version)),
            "step": 0,  # another rank's copy counts
        }
    with pytest.raises(StaleVersion, match=r"keeps versions \[2, 3\], not 1"):
        mirror.offer(1)


def test_a_rank_that_is_lost_while_it_is_copied_leaves_the_version_before(
    mirror: MirrorWorker, rank: Transport
) -> None:
    for version in range(2):
        train(rank, version)
        take(mirror, rank, version)
    with pytest.raises(NereusError):
        take(mirror, rank, 2, timeout=0.5)  # it does not offer that
    assert mirror.versions() == [1]
    assert (given(mirror, 1) == weight(1)).all()
    train(rank, 2)
    take(mirror, rank, 2)
    assert mirror.versions() == [1, 2]
