"""An error that means that a process is gone says so, whatever it looked like where it arose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nereus_controller.gone import explained

from nereus_common.core.errors import NereusError, NotFound, ProcessLost, Unavailable
from nereus_common.core.ids import JobId
from nereus_common.registry import Registry, ServiceRecord
from nereus_common.registry.memory import MemoryRegistry

pytestmark = pytest.mark.fast
JOB = JobId("j")
TARGET = "127.0.0.1:7001"


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    (tmp_path / "log").write_text("first\nlast\n")
    async with MemoryRegistry() as made:
        record = ServiceRecord("training", "training", TARGET, "node0", log=str(tmp_path / "log"))
        await made.announce_service(record, "t-1", 60.0)
        yield made


async def test_a_service_that_cannot_be_reached_is_named_with_the_end_of_its_log(registry: Registry) -> None:
    error = await explained(Unavailable("no answer", target=TARGET), JOB, registry)
    assert isinstance(error, ProcessLost)
    assert "the training service on node0 is gone: no answer" in str(error) and "`nereus up`" in str(error)
    assert error.details["log"] == "first\nlast"


@pytest.mark.parametrize("details", [{"unit": "j.actor.training.e1.r0"}, {"job": "j"}])
async def test_what_was_placed_and_is_unknown_now_was_lost(registry: Registry, details: dict[str, str]) -> None:
    error = await explained(NotFound("no such thing here", **details), JOB, registry)
    assert isinstance(error, ProcessLost)


@pytest.mark.parametrize(
    "error", [NotFound("no config.json", field="model"), NotFound("x", job="other"), Unavailable("no reader")]
)
async def test_other_errors_stay_what_they_are(registry: Registry, error: NereusError) -> None:
    assert await explained(error, JOB, registry) is error
