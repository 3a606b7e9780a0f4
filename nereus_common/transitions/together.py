"""Which ends the nodes of a model-stage wait for, chosen for all of them at once.

One after another, a node asks the units on each of its devices to end until it fits there. Where every device needs
one end at most, the first unit asked is the answer and no choice bears on another, so that columns say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus_common.transitions.change import Change, Column
from nereus_common.transitions.sources import NOBODY, Holders


@dataclass(frozen=True, slots=True)
class Choice:
    """Per (node, rank): `asked`, the old unit that has to end there, or NOBODY; `freed`, the bytes that its end frees;
    `lacking`, what is missing though all end that may, above 0 where the node does not fit."""

    asked: Column
    freed: Column
    lacking: Column

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Per node, whether it does not fit."""
        return np.asarray((self.lacking > 0).any(axis=1))


def choose(
    holders: Holders, changes: Sequence[Change], of: Change, places: Column, short: Column, spared: Change | None
) -> Choice | None:
    """For the nodes of `of` on `places`, which lack `short`, without the end of a unit of `spared`. None where one
    choice may bear on another."""
    standing, held = holders.at[:, places], holders.held[:, places]
    if spared is not None:
        standing[spared.row] = NOBODY
    held[standing == NOBODY] = 0
    lacking = short - held.sum(axis=0)
    first = (standing != NOBODY).argmax(axis=0)[None]
    freed = np.take_along_axis(held, first, 0)[0]
    fitting = ~(lacking > 0).any(axis=1)
    asks = (short > 0) & fitting[:, None]
    asked = np.where(asks, np.take_along_axis(standing, first, 0)[0], NOBODY)
    if (freed < short)[asks].any() or not _apart(standing[:, fitting], asked[fitting]):
        return None
    for change in changes:
        if not _may_end(holders, change, standing[change.row], asked, fitting):
            return None
    own = of.old.first <= asked
    if len(asked) > 1 and (own & (asked < of.new.first)).any():
        return None
    return Choice(asked, np.where(asks, freed, 0), lacking)


def _apart(standing: Column, asked: Column) -> bool:
    """Whether every unit that is asked to end is asked wherever it stands."""
    wanted = np.unique(asked[asked != NOBODY])
    return bool(np.isin(standing, wanted).sum() == (asked != NOBODY).sum())


def _may_end(holders: Holders, change: Change, standing: Column, asked: Column, fitting: NDArray[np.bool_]) -> bool:
    """Whether a unit of `change` stays intact even if all end that nodes which fit, and one that does not, ask to."""
    if not holders.guarded(change):
        return True
    mine = asked[(asked >= change.old.first) & (asked < change.new.first)]
    tried = max((len(set(row) - {NOBODY}) for row in standing[~fitting].tolist()), default=0)
    return len(np.unique(mine)) + tried <= holders.spare(change)
