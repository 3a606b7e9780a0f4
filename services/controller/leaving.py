"""Generation units that a transition releases: what they have in flight ends, goes on elsewhere, or is drawn again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nereus.spec.options import InFlight
from nereus_common.core.errors import DeadlineExceeded

from .checkpoints import Emit
from .generation import GenerationPool

_TOLD = {
    "finish": "finish on the units that go",
    "resume": "go on on the units that take the place of theirs",
    "requeue": "are thrown away, and their groups drawn again",
}


@dataclass(frozen=True, slots=True)
class Leaving:
    """`how`: the job's `transitions.in_flight`. `timeout`: seconds that the units have to be empty."""

    pool: GenerationPool
    how: InFlight
    timeout: float
    emit: Emit

    async def empty(self, transition: str, kept: Collection[str]) -> None:
        """Return once nothing is in flight on the units that are not `kept`, which take no more requests.

        DeadlineExceeded says how much is left.
        """
        units = [unit for unit in self.pool.units if unit.id not in kept]
        if not units:
            return
        count = self.pool.in_flight(units)
        if count:
            message = f"transition {transition}: {count} responses in flight {_TOLD[self.how]}"
            await self.emit("log", {"level": "info", "message": message})
        left = await self.pool.drain(self.how, self.timeout, units)
        if left:
            names = ", ".join(unit.id for unit in units)
            raise DeadlineExceeded(
                f"transition {transition}: {left} requests on {names} did not end within {self.timeout:g} s",
                remedy="raise deadlines.generate, ask for shorter responses, or set transitions.in_flight: resume",
                transition=transition,
            )

    async def stay(self) -> None:
        """The plan in force stays: units that were emptied take requests again, and what they handed back goes on."""
        await self.pool.undo()
