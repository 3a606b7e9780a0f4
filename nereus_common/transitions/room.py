"""The memory check: how much each device may have in use, whatever order the edges allow.

Nodes are placed one after another. A device starts with everything old on it. A placed node adds what it acquires; an
old unit leaves the count only when a node is made to wait for its end, and from then on every node placed on that
device waits for it too (a *gate*). So what the nodes placed so far can have in use on a device is largest when all of
them run and only the gates are passed, and this sum is what is compared with the budget: one number per device, right
for every order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import DeviceId
from nereus_common.transitions.change import Change, Column, DeviceNumbers


class Room:
    """`use`: bytes in use at most after the nodes placed so far; `peak`: the largest that ever was."""

    def __init__(
        self,
        changes: Sequence[Change],
        numbers: DeviceNumbers,
        budgets: Mapping[DeviceId, int],
        occupied: Mapping[DeviceId, int],
    ) -> None:
        self.budget = np.fromiter(budgets.values(), np.int64, len(budgets))
        self.use = np.zeros(len(budgets), np.int64)
        for device, taken in occupied.items():
            self.use[numbers[device]] += taken
        for change in changes:
            self.use[change.old.places] += change.old.total
        self.peak = self.use.copy()
        self.gated = np.zeros(len(budgets), bool)
        self._gates: dict[int, list[int]] = {}

    def fits(self, places: Column, needed: Column) -> NDArray[np.bool_]:
        """Per unit (row of `places`), whether it fits beside everything, with nothing to wait for."""
        inside = (self.use[places] + needed <= self.budget[places]) & ~self.gated[places]
        return np.asarray(inside.all(axis=1))

    def lacking(self, places: Column, needed: Column) -> Column:
        """Per place, the bytes that are missing; not above 0 where there is room."""
        short: Column = self.use[places] + needed - self.budget[places]
        return short

    def take(self, places: Column, during: Column, after: Column) -> None:
        """A node adds `during` while it runs and `after` when it is done; no place twice."""
        use = self.use[places]
        self.peak[places] = np.maximum(self.peak[places], use + during)
        self.use[places] = use + after

    def release(self, place: int, amount: int, node: int) -> None:
        """Whatever is placed on `place` from now on waits for `node`, which has freed `amount` by then."""
        self.use[place] -= amount
        self.gate(place, node)

    def gate(self, place: int, node: int) -> None:
        self.gated[place] = True
        self._gates.setdefault(place, []).append(node)

    def gates(self, places: Column) -> list[int]:
        """What a node on these places has to wait for."""
        shut = places[self.gated[places]].tolist()
        return list(dict.fromkeys(node for place in shut for node in self._gates[place]))
