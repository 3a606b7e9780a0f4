"""A checkpoint that is being written, and somebody who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nereus_controller.checkpoints import Checkpointer, Described
from nereus_controller.progress import Progress

from nereus.spec.options import CheckpointSpec
from nereus_common.core.ids import JobId
from nereus_common.core.plan import Plan

pytestmark = pytest.mark.fast


class Telling:
    """Tells slowly, and ends by itself just as it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.cancelled = False
        self.told: list[str] = []

    async def emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
        self.told.append(kind)


async def test_who_is_cancelled_while_he_waits_stays_cancelled_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    """A checkpoint of no model: how it went does not matter, but that it is told."""
    telling = Telling()
    described = Described(JobId("j"), 1, Plan(()), "{}", {})
    checkpointer = Checkpointer(described, (), tmp_path, CheckpointSpec(every=1), telling.emit, steps=9, timeout=30.0)
    await checkpointer.after_step(Progress(1, 4))
    waiting = asyncio.create_task(checkpointer.close())
    await telling.begun.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not telling.cancelled
    telling.go_on.set()
    await checkpointer.close()
    assert len(telling.told) == 1 and not telling.cancelled
