"""The body of a device's process: it takes in the body of one rank after another."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

ENGINES = ("nereus_common.engines.training.worker", "nereus_common.engines.inference.worker")


class DeviceRank:
    """Constructing it pays for the imports. As in a process of its own, a rank's plain methods run on the main thread
    and its `async` ones on the io thread."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._rank: Any = None
        for name in ENGINES:
            importlib.import_module(name)

    def open(self, body: str, config: Any) -> frozenset[str]:
        """Build a rank; the names of its `async` methods."""
        if self._rank is not None:
            raise RuntimeError(f"the process of {self._device} has a rank already")
        module, _, name = body.partition(":")
        kind = getattr(importlib.import_module(module), name)
        self._rank = kind(config)
        return frozenset(name for name, _ in inspect.getmembers(kind, inspect.iscoroutinefunction))

    def call(self, method: str, given: Sequence[Any]) -> Any:
        return getattr(self._rank, method)(*given)

    async def call_async(self, method: str, given: Sequence[Any]) -> Any:
        return await getattr(self._rank, method)(*given)

    def shut(self) -> None:
        """End the rank, where there is one."""
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.close()

    def close(self) -> None:
        self.shut()
