"""Packs: rows of tokens in which the prompt of a group is computed once for all its responses.

A pack is cut into segments, one per (part of a) group: `[prompt | response 1 | response 2 | …]`. A row sees an
earlier row iff both have the same `prefix` and the earlier one lies on the prompt (`branch` 0) or on the same
branch. Positions go on from the prompt's end on every branch, so each response sees exactly what it would see
alone. The last token of a response predicts nothing and gets no row, except where the row at the very end of each
sequence is what is asked for (`ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.rollouts import RolloutBatch

ROW_QUANTUM = 64
"""Pack lengths and row counts are multiples of this, so that few shapes occur."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """T rows, of which the first `used` are real, and R predictions.

    input_ids, position_ids, prefix, branch [T] int32: padding rows have prefix -1 and see nothing.
    logit_rows [R] int64: the row whose logits predict a response token; rows of a shared prompt occur once per branch.
    targets [R] int32: that token. source [R] int64: its index in the batch's per-token columns, -1 where padded.

    A pack of ends has one prediction per sequence instead: logit_rows at its last token, targets 0, source the
    sequence's index.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    prefix: NDArray[np.int32]
    branch: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    targets: NDArray[np.int32]
    source: NDArray[np.int64]

    @property
    def used(self) -> int:
        return int((self.prefix >= 0).sum())

    @property
    def segments(self) -> tuple[slice, ...]:
        """The rows of each prefix, in order; rows of different segments never see each other."""
        real = self.prefix[: self.used]
        edges = [*np.flatnonzero(np.diff(real, prepend=-1)).tolist(), len(real)]
        return tuple(slice(start, stop) for start, stop in pairwise(edges))

    def visible(self, segment: slice) -> NDArray[np.bool_]:
        """[S, S]: whether row i of the segment sees row j."""
        branch = self.branch[segment]
        order = np.arange(len(branch))
        same: NDArray[np.bool_] = (branch[None, :] == 0) | (branch[None, :] == branch[:, None])
        return same & (order[None, :] <= order[:, None])

    def padded(self, rows: int, predictions: int) -> Pack:
        """The same pack with at least this many rows and predictions."""
        more_rows = max(0, rows - len(self.input_ids))
        more = max(0, predictions - len(self.targets))
        return Pack(
            np.pad(self.input_ids, (0, more_rows)),
            np.pad(self.position_ids, (0, more_rows)),
            np.pad(self.prefix, (0, more_rows), constant_values=-1),
            np.pad(self.branch, (0, more_rows)),
            np.pad(self.logit_rows, (0, more)),
            np.pad(self.targets, (0, more)),
            np.pad(self.source, (0, more), constant_values=-1),
        )


Predictions = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]
"""logit_rows, targets and source, as in `Pack`."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Responses of one group that are computed behind one copy of its prompt."""

    group: int
    sequences: tuple[int, ...]
    rows: int


def pack_batch(
    batch: RolloutBatch,
    budget: int,
    *,
    shared_prefix: bool = True,
    wanted: NDArray[np.bool_] | None = None,
    ends: bool = False,
) -> list[Pack]:
    """Packs of at most `budget` rows; a sequence that is longer gets one of the next multiple of the budget.

    `wanted` [R]: the tokens to be predicted, None for all; sequences without any are left out. `ends`: the row of every
    sequence's last token, whatever is masked; of the prompt's last where the response is empty. An empty batch gives no
    packs. Equal input gives equal packs.
    """
    segments = _segments(batch, budget, shared_prefix, wanted, ends)
    return [_build(batch, bin_, wanted, ends, budget) for bin_ in _fill(segments, budget)]


def pack_for_ranks(
    batch: RolloutBatch,
    degree: int,
    budget: int,
    *,
    shared_prefix: bool = True,
    wanted: NDArray[np.bool_] | None = None,
    ends: bool = False,
    at_least: int = 1,
) -> list[list[Pack]]:
    """`pack_batch` for each of `degree` ranks: the same number for all, at least `at_least`, some perhaps empty.

    The rows are spread evenly: the packs are as short as their number allows.
    """
    segments = _segments(batch, budget, shared_prefix, wanted, ends)
    count = max(at_least, -(-len(_fill(segments, budget)) // degree)) * degree
    bins = _fill(segments, _tightest(segments, budget, count))
    bins += [[] for _ in range(count - len(bins))]
    dealt = _deal(bins, degree)
    return [[_build(batch, bin_, wanted, ends, budget) for bin_ in share] for share in dealt]


def common_shape(packs: Sequence[Pack]) -> tuple[int, int]:
    """The rows and predictions that hold every one of the packs: a pipeline passes tensors of one shape."""
    return max(len(pack.input_ids) for pack in packs), max(len(pack.targets) for pack in packs)


def _segments(
    batch: RolloutBatch, budget: int, shared_prefix: bool, wanted: NDArray[np.bool_] | None, ends: bool
) -> list[_Segment]:
    lengths, prompts = batch.response_lengths, np.diff(batch.prompt_offsets)
    if budget < 1:
        raise InvalidInput(f"a pack of {budget} tokens holds nothing", field="microbatch_tokens")
    if (prompts < 1).any():
        raise InvalidInput("rollouts: a prompt is empty, nothing predicts its first token", field="prompt_tokens")
    segments: list[_Segment] = []
    current: list[int] = []
    rows = 0
    for sequence in range(batch.sequences):
        if not ends and (not lengths[sequence] or (wanted is not None and not wanted[batch.span(sequence)].any())):
            continue
        group, own = int(batch.group[sequence]), int(lengths[sequence]) - (not ends)
        joins = shared_prefix and current and batch.group[current[0]] == group and rows + own <= budget
        if current and not joins:
            segments.append(_Segment(int(batch.group[current[0]]), tuple(current), rows))
        current, rows = ([*current, sequence], rows + own) if joins else ([sequence], int(prompts[group]) + own)
    if current:
        segments.append(_Segment(int(batch.group[current[0]]), tuple(current), rows))
    return segments


def _fill(segments: Sequence[_Segment], capacity: int) -> list[list[_Segment]]:
    """First fit, longest first; what exceeds the capacity gets a bin of its own."""
    bins: list[list[_Segment]] = []
    free: list[int] = []
    for segment in sorted(segments, key=lambda s: (-s.rows, s.sequences)):
        place = next((i for i, room in enumerate(free) if room >= segment.rows), None)
        if place is None:
            bins.append([segment])
            free.append(capacity - segment.rows)
        else:
            bins[place].append(segment)
            free[place] -= segment.rows
    return bins


def _tightest(segments: Sequence[_Segment], budget: int, count: int) -> int:
    """The smallest capacity, a multiple of the quantum up to the budget, at which `count` bins suffice."""
    total = sum(segment.rows for segment in segments)
    for capacity in range(round_up(max(1, total // count), ROW_QUANTUM), budget, ROW_QUANTUM):
        if len(_fill(segments, capacity)) <= count:
            return capacity
    return budget


def _deal(bins: Sequence[list[_Segment]], degree: int) -> list[list[list[_Segment]]]:
    """Bins to ranks, equally many each, the fullest first to the rank with the fewest rows."""
    share = len(bins) // degree
    dealt: list[list[list[_Segment]]] = [[] for _ in range(degree)]
    load = [0] * degree
    for bin_ in sorted(bins, key=lambda b: -sum(segment.rows for segment in b)):
        rank = min((r for r in range(degree) if len(dealt[r]) < share), key=lambda r: (load[r], r))
        dealt[rank].append(bin_)
        load[rank] += sum(segment.rows for segment in bin_)
    return dealt


def _build(
    batch: RolloutBatch, bin_: Sequence[_Segment], wanted: NDArray[np.bool_] | None, ends: bool, budget: int
) -> Pack:
    ids, positions, prefix, branch = ([np.empty(0, np.int32)] for _ in range(4))
    predicted: list[Predictions] = [(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))]
    base = 0
    for number, segment in enumerate(bin_):
        prompt = batch.prompt(segment.group)
        ids.append(prompt)
        positions.append(np.arange(len(prompt), dtype=np.int32))
        branch.append(np.zeros(len(prompt), np.int32))
        prefix.append(np.full(segment.rows, number, np.int32))
        start = base + len(prompt)
        for index, sequence in enumerate(segment.sequences, start=1):
            response = batch.response(sequence)
            own = len(response) - (not ends)
            ids.append(response[:own])
            positions.append(np.arange(len(prompt), len(prompt) + own, dtype=np.int32))
            branch.append(np.full(own, index, np.int32))
            seen = np.concatenate([[base + len(prompt) - 1], np.arange(start, start + own)])
            predicted.append(_predictions(batch, sequence, seen, wanted, ends))
            start += own
        base = start
    rows, targets, source = zip(*predicted, strict=True)
    pack = Pack(
        np.concatenate(ids),
        np.concatenate(positions),
        np.concatenate(prefix),
        np.concatenate(branch),
        np.concatenate(rows),
        np.concatenate(targets),
        np.concatenate(source),
    )
    length = min(round_up(max(base, 1), ROW_QUANTUM), budget) if base <= budget else round_up(base, budget)
    return pack.padded(length, round_up(len(pack.targets), ROW_QUANTUM))


def _predictions(
    batch: RolloutBatch, sequence: int, seen: NDArray[np.int64], wanted: NDArray[np.bool_] | None, ends: bool
) -> Predictions:
    """Of one sequence. `seen`: the prompt's last row, then the rows of the response."""
    if ends:
        return seen[-1:], np.zeros(1, np.int32), np.array([sequence])
    span = batch.span(sequence)
    keep = slice(None) if wanted is None else wanted[span]
    return seen[keep], batch.response(sequence)[keep], np.arange(span.start, span.stop)[keep]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
