"""The memory check: how much each device may have in use, whatever order the edges allow.

Nodes are placed one after another. A device starts with everything old on it. A placed node adds what it acquires; an
old unit leaves the count only when a node is made to wait for its end, and from then on every node placed on that
device waits for it too (a *gate*). So what the nodes placed so far can have in use on a device is largest when all of
them run and only the gates are passed, and this sum is what is compared with the budget: one number per device, right
for every order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import DeviceId
from nereus_common.transitions.change import Change, Column, DeviceNumbers

OPEN = -1
"""Where a device has no further gate."""


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
        self._gates = np.full((len(changes), len(budgets)), OPEN)
        self._shut = np.zeros(len(budgets), np.int64)

    def fits(self, places: Column, needed: Column) -> NDArray[np.bool_]:
        """Per unit (row of `places`), whether it fits beside everything, with nothing to wait for."""
        inside = (self.lacking(places, needed) <= 0) & (self._shut[places] == 0)
        return np.asarray(inside.all(axis=1))

    def lacking(self, places: Column, needed: Column) -> Column:
        """Per place, the bytes that are missing; not above 0 where there is room."""
        short: Column = self.use[places] + needed - self.budget[places]
        return short

    def take(self, places: Column, during: Column, after: Column) -> None:
        """Nodes add `during` while they run and `after` when they are done; no place twice."""
        use = self.use[places]
        self.peak[places] = np.maximum(self.peak[places], use + during)
        self.use[places] = use + after

    def release(self, places: Column, amounts: Column, nodes: Column | int) -> None:
        """Whatever is placed on `places` from now on waits for `nodes`, which have freed `amounts` by then."""
        self.use[places] -= amounts
        self.gate(places, nodes)

    def gate(self, places: Column, nodes: Column | int) -> None:
        """One more node to wait for on each of `places`, none of which is named twice."""
        shut = self._shut[places]
        if shut.max(initial=0) == len(self._gates):
            self._gates = np.concatenate((self._gates, np.full_like(self._gates, OPEN)))
        self._gates[shut, places] = nodes
        self._shut[places] = shut + 1

    def gates(self, places: Column) -> list[list[int]]:
        """Per node (row of `places`), the nodes that it has to wait for, some of them more than once. What already
        the rank before waits for in the same place is left out."""
        shut = self._gates[: int(self._shut[places].max(initial=0)), places]
        told = shut != OPEN
        told[:, :, 1:] &= shut[:, :, 1:] != shut[:, :, :-1]
        told = told.transpose(1, 2, 0)
        waits = iter(shut.transpose(1, 2, 0)[told].tolist())
        return [list(islice(waits, count)) for count in told.sum(axis=(1, 2)).tolist()]
