"""What a weight sync moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Synced:
    """`bytes_moved` as counted at the transport, `phases` in seconds."""

    model: str
    bytes_moved: int
    bytes_needed: int
    seconds: float
    phases: Mapping[str, float]

    def told(self) -> dict[str, Any]:
        """As events tell it."""
        return {
            "model": self.model,
            "bytes_moved": self.bytes_moved,
            "bytes_needed": self.bytes_needed,
            "seconds": self.seconds,
            "phases": dict(self.phases),
        }
