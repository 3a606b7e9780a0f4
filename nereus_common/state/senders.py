"""Who sends each piece: the nearest of those who hold it, and of these the one with the least to send so far."""

from __future__ import annotations

import numpy as np

from nereus_common.core.transfer import RankRef
from nereus_common.state.box_arrays import Integers
from nereus_common.state.distance import Distance, distances
from nereus_common.state.pieces import Pieces, RankSets


def nearest(pieces: Pieces, sets: RankSets, ranks: tuple[RankRef, ...], distance: Distance) -> Pieces:
    """The same pieces, the holders of each narrowed to those that are nearest to its target."""
    narrowed = pieces.holders.copy()
    order = np.argsort(pieces.holders, kind="stable")
    ends = np.flatnonzero(np.diff(pieces.holders[order], append=-1)) + 1
    for rows in np.split(order, ends[:-1]):
        if len(rows) and len(sets[int(pieces.holders[rows[0]])]) > 1:
            narrowed[rows] = _nearest(pieces.target[rows], int(pieces.holders[rows[0]]), sets, ranks, distance)
    return Pieces(pieces.geometry, pieces.target, pieces.boxes, narrowed)


def _nearest(target: Integers, number: int, sets: RankSets, ranks: tuple[RankRef, ...], distance: Distance) -> Integers:
    """For each of the targets, the number of the nearest of set `number`."""
    holders = sets[number]
    distinct, at = np.unique(target, return_inverse=True)
    apart = distances(distance, [ranks[holder] for holder in holders], [ranks[one] for one in distinct])
    near = apart == apart.min(axis=1, keepdims=True)
    chosen: Integers = np.array([number if row.all() else sets.number(holders[row]) for row in near], np.int64)
    return chosen[at]


def balanced(candidates: Integers, size: Integers, sets: RankSets, ranks: int) -> Integers:
    """The sender of each item: `candidates` are the numbers of rank sets, `size` what is to be sent.

    Items with fewer candidates first, then large ones first (Graham's LPT rule), each to the candidate with the least
    load; items of the same candidates and size are dealt out in one go, in turn, which gives the same.
    """
    load = np.zeros(ranks, np.int64)
    counts = sets.sizes[candidates]
    sender: Integers = sets.firsts[candidates]
    alone = counts == 1
    np.add.at(load, sender[alone], size[alone])
    rest = np.flatnonzero(~alone)
    order = rest[np.lexsort((candidates[rest], -size[rest], counts[rest]))]
    changes = (np.diff(candidates[order]) != 0) | (np.diff(size[order]) != 0)
    for group in np.split(order, np.flatnonzero(changes) + 1):
        if len(group):
            able, weight = sets[int(candidates[group[0]])], int(size[group[0]])
            dealt = _deal(load[able], len(group), weight)
            sender[group] = able[dealt]
            load[able] += np.bincount(dealt, minlength=len(able)) * weight
    return sender


def _deal(load: Integers, count: int, weight: int) -> Integers:
    """Who gets each of `count` items of equal weight when each goes to the least loaded, the first of them in a tie.

    Candidate i takes its k-th item (from 0) when load[i] + k · weight is the least there is: the items go to the
    `count` smallest of these numbers, in order. None of them lies above the level to which `count` items fill up.
    """
    if count == 1:
        return np.array([load.argmin()])
    order = np.argsort(load, kind="stable")
    ascending = load[order]
    sharing = np.arange(1, len(load) + 1)
    levels = -(-(np.cumsum(ascending) + count * weight) // sharing)
    level = levels[np.flatnonzero(levels >= ascending)[-1]]
    chances = np.maximum(0, -(-(level - load) // weight))
    taker = np.repeat(np.arange(len(load)), chances)
    nth = np.arange(len(taker)) - np.repeat(np.cumsum(chances) - chances, chances)
    turn = np.lexsort((taker, load[taker] + nth * weight))
    dealt: Integers = taker[turn[:count]]
    return dealt
