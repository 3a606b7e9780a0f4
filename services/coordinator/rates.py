"""How fast bytes came over each kind of link, as the weight syncs of this coordinator's jobs measured it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NEWEST = 0.3
"""Share of the newest measurement in a rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank received, most of it from senders at `distance`."""

    distance: int
    bytes: int
    seconds: float


class LinkRates:
    """Bytes per second that one rank receives, by distance; nothing is known before the first measurement."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def saw(self, measured: Iterable[Measured]) -> None:
        for one in measured:
            if one.bytes and one.seconds > 0:
                rate = one.bytes / one.seconds
                known = self._rates.setdefault(one.distance, rate)
                self._rates[one.distance] = known + NEWEST * (rate - known)

    @property
    def bytes_per_second(self) -> Mapping[int, float]:
        return dict(self._rates)
