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
    `lacking`, what is missing though all end that may. `refused`: per node, whether it does not fit."""

    asked: Column
    freed: Column
    lacking: Column
    refused: NDArray[np.bool_]


def choose(
    holders: Holders, changes: Sequence[Change], of: Change, places: Column, short: Column, spared: Change | None
) -> Choice | None:
    """For the nodes of `of` on `places`, which lack `short`, without the end of a unit of `spared`. None where one
    choice may bear on another."""
    standing, held = holders.at[:, places], holders.held[:, places]
    if spared is not None:
        standing[spared.row] = NOBODY
    there = standing != NOBODY
    held *= there
    lacking = short - held.sum(axis=0)
    refused = (lacking > 0).any(axis=1)
    asks = (short > 0) & ~refused[:, None]
    first = there.argmax(axis=0)[None]
    asked = np.where(asks, np.take_along_axis(standing, first, 0)[0], NOBODY)
    freed = np.take_along_axis(held, first, 0)[0] * asks
    if (asks & (freed < short)).any():
        return None
    ending = holders.among(asked)
    if not _apart(ending, standing, asks, refused) or (len(asks) > 1 and ending[of.old.numbers].any()):
        return None
    if not all(_may_end(holders, change, ending, standing[change.row], refused) for change in changes):
        return None
    return Choice(asked, freed, lacking, refused)


def _apart(ending: NDArray[np.bool_], standing: Column, asks: NDArray[np.bool_], refused: NDArray[np.bool_]) -> bool:
    """Whether every unit that has to end is asked wherever it stands."""
    return bool((ending[standing] & ~refused[:, None]).sum() == asks.sum())


def _may_end(
    holders: Holders, change: Change, ending: NDArray[np.bool_], standing: Column, refused: NDArray[np.bool_]
) -> bool:
    """Whether a unit of `change` stays intact even if all end that the nodes which fit, and any other one, ask to."""
    if not holders.guarded(change):
        return True
    tried = np.sort(standing[refused], axis=1)
    units = (tried[:, 1:] != tried[:, :-1]).sum(axis=1) + (tried[:, 0] != NOBODY)
    asking = int(ending[change.old.numbers].sum()) + int(units.max(initial=0))
    return asking <= max(holders.spare(change), 0)
