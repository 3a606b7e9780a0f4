"""What the phases of a step ask of the hardware: seconds at nominal peaks, by class of operations, of the rank that is
done last. For many placements at once: every result is a column over their rows.

    gemm, attention     floating-point operations; by stage, because the stages compute with other kernels
    memory              bytes through a device's own memory, where those and not operations are the limit
    call                launches: what a pass costs however few rows it has
    begin               what a task, an update or a weight sync costs however few passes it has
    all_reduce, all_gather, reduce_scatter, p2p, pull     bytes over a link, by the link's kind

CPU devices of a node share its cores, so that what they do at once takes as long as one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidPlan
from nereus_common.planning.counts import BACKWARD, PER_MULTIPLY_ADD, chosen_experts, weights_read
from nereus_common.planning.decoding import Segments, segments
from nereus_common.planning.placements import LINKS, Column, Part, Placements, Ways
from nereus_common.planning.workload import Workload

CALL_SECONDS = 2e-5
"""Nominal, of one layer's launches in one pass."""
BEGIN_SECONDS = 1e-3
"""Nominal: calls to services and processes, and packing what they are given."""
OPTIMIZER_PASSES = 7
"""An update of Adam reads a parameter, its gradient and two moments, and writes all but the gradient."""
WIDE = 4
"""Bytes of the float32 in which gradients are reduced and optimizer state is held."""
REDUCTIONS = 2
"""Among tensor ranks in a layer's forward pass, and again in its backward pass (Shoeybi et al. 2019)."""

Demand = Mapping[str, Column]
"""Class → nominal seconds by row."""


def inference(placements: Placements, workload: Workload) -> Demand:
    """Scoring the step's sequences: a forward pass over each unit's share."""
    ask = _Ask(placements)
    ask.begin(1)
    ask.passes(workload, 1, forward=np.ones_like(placements.tp), backward=0)
    ask.gather(1)
    return ask.demand


def training(placements: Placements, workload: Workload) -> Demand:
    """All updates of the step: forward and backward over each rank's share, reduction of the gradients, optimizer."""
    ask, updates = _Ask(placements), workload.minibatches * workload.epochs
    ask.begin(updates)
    ask.passes(workload, updates, forward=1 + placements.recompute, backward=1)
    ask.gather(updates)
    fs, replicas = placements.fs, placements.replicas
    gradients = placements.held * WIDE * updates
    ask.send("reduce_scatter", (fs - 1) / fs * gradients, placements.shards)
    ask.send("all_reduce", 2 * (replicas - 1) / replicas * gradients / fs, placements.everyone)
    ask.add("memory", gradients / fs * OPTIMIZER_PASSES / placements.stream)
    return ask.demand


def generation(placements: Placements, workload: Workload) -> Demand:
    """Sampling the step's responses on units of one pipeline stage: each group's prompt once, then token by token."""
    if (placements.pp > 1).any():
        raise InvalidPlan(f"{placements.name} decodes in one pipeline stage", field=f"stages.{placements.name}.layout")
    ask, part = _Ask(placements), placements.busiest
    groups = np.ceil(workload.groups / placements.replicas)
    rows, pairs = groups * workload.prompt, groups * workload.prompt * (workload.prompt + 1) / 2
    ask.add("gemm", PER_MULTIPLY_ADD * part.body * rows / placements.peak)
    ask.add("attention", PER_MULTIPLY_ADD * part.pair * pairs / placements.peak)
    ask.begin(1)
    decoded = _decoded(placements, workload, groups)
    ask.add("memory", decoded.waiting)
    ask.add("gemm", decoded.computing)
    ask.add("call", (decoded.iterations + np.ceil(rows / placements.batched)) * part.layers * CALL_SECONDS)
    ask.reduce(part.layers * REDUCTIONS * (rows + decoded.tokens))
    return ask.demand


def pull(placements: Placements, lacking: Column) -> Demand:
    """The weight sync of receiving ranks that lack so many bytes, which they read again to compare them."""
    ask = _Ask(placements, of="sync")
    ask.begin(1)
    ask.send("pull", lacking, placements.everyone)
    ask.add("memory", lacking / placements.stream)
    return ask.demand


class _Ask:
    """Gathers the classes. `of`: whose those are that are no links', by default the stage's."""

    def __init__(self, placements: Placements, of: str = "") -> None:
        self._placements = placements
        self._of = of or str(placements.name.stage)
        self.demand: dict[str, Column] = {}

    def passes(self, workload: Workload, updates: int, *, forward: Column, backward: int) -> None:
        """So many forward and backward passes over the packed rows of each update, in microbatches through the
        pipeline. What is computed again is computed without the head."""
        placed, tokens = self._placements, workload.packed()
        share = placed.data_parallel * (workload.minibatches if backward else 1)
        rows, pairs, predicted = tokens.rows / share, tokens.pairs / share, tokens.predicted / share
        count = np.maximum(placed.pp, np.ceil(rows / placed.microbatch))
        often = updates * (count + placed.pp - 1) / count
        products, of_head = forward + BACKWARD * backward, 1 + BACKWARD * backward

        def gemm(part: Part) -> Column:
            return PER_MULTIPLY_ADD * (part.body * rows * products + part.head * predicted * of_head)

        def attention(part: Part) -> Column:
            return PER_MULTIPLY_ADD * part.pair * pairs * products

        ends_last = gemm(placed.last) + attention(placed.last) > gemm(placed.busiest) + attention(placed.busiest)
        slowest = Part(
            *(np.where(ends_last, last, other) for last, other in zip(placed.last, placed.busiest, strict=True))
        )
        self.add("gemm", gemm(slowest) * often / placed.peak)
        self.add("attention", attention(slowest) * often / placed.peak)
        self.add("call", slowest.layers * count * products * often * CALL_SECONDS)
        self.reduce(slowest.layers * rows * REDUCTIONS * (forward + backward) * often)
        hidden = rows * updates * (1 + backward) * placed.model.hidden * placed.item
        self.send("p2p", np.where(placed.pp > 1, hidden, 0.0), placed.unit)

    def begin(self, times: int) -> None:
        self.add("begin", np.full_like(self._placements.tp, times * BEGIN_SECONDS))

    def gather(self, updates: int) -> None:
        """Parameters over fs, in the dtype that is computed with."""
        placed = self._placements
        size = (placed.fs - 1) / placed.fs * placed.held * placed.item * updates
        self.send("all_gather", size, placed.shards)

    def reduce(self, rows: Column) -> None:
        """All-reduces of so many rows of hidden states, among the tp ranks of a stage."""
        placed = self._placements
        size = 2 * (placed.tp - 1) / placed.tp * rows * placed.model.hidden * placed.item
        self.send("all_reduce", size, placed.tensor)

    def send(self, operation: str, size: Column, ways: Ways) -> None:
        """`size` bytes that a rank sends, and as many that it receives."""
        for kind, link in enumerate(LINKS):
            self._sum(f"{operation}.{link}", np.where(ways.kind == kind, size / ways.rate, 0.0))

    def add(self, name: str, seconds: Column) -> None:
        self._sum(f"{self._of}.{name}", seconds)

    def _sum(self, name: str, seconds: Column) -> None:
        if seconds.any():
            self.demand[name] = self.demand[name] + seconds if name in self.demand else seconds


class _Decoded(NamedTuple):
    """Of the busiest unit, by row: seconds of iterations that wait for memory, and of those that wait for products; how
    many iterations, and tokens."""

    waiting: Column
    computing: Column
    iterations: Column
    tokens: Column


def _decoded(placed: Placements, workload: Workload, groups: Column) -> _Decoded:
    """Rows whose units have as many groups, and as many sequences at once, decode alike but for their hardware."""
    fits = placed.kv_bytes // (placed.position_bytes * (workload.prompt + workload.response))
    slots = np.maximum(1, np.minimum(placed.sequences, fits))
    kinds, rows_of = np.unique(np.stack([groups, slots]), axis=1, return_inverse=True)
    found = _Decoded(*(np.zeros_like(groups) for _ in range(4)))
    for number, (count, most) in enumerate(kinds.T.astype(int).tolist()):
        rows = np.flatnonzero(rows_of.reshape(-1) == number)
        segments = _segments(workload, count, most)
        found.waiting[rows], found.computing[rows] = _bound(placed, rows, segments)
        found.iterations[rows], found.tokens[rows] = segments.total_iterations, segments.tokens
    return found


def _bound(placed: Placements, rows: NDArray[np.intp], decoded: Segments) -> tuple[Column, Column]:
    """An iteration reads the weights that it computes with, and what its sequences look back on; it takes the longer of
    that and its products."""
    body, head, pair, experts = (values[rows, None] for values in placed.busiest[:4])
    weights = weights_read(body + head, experts, chosen_experts(placed.model), decoded.active) * placed.item[rows, None]
    looked_back = decoded.context * placed.position_bytes[rows, None]
    streamed = (weights + looked_back) / placed.stream[rows, None]
    products = decoded.active * (body + head) + decoded.context * pair
    computed = PER_MULTIPLY_ADD * products / placed.peak[rows, None]
    waits = streamed > computed
    waiting = np.where(waits, streamed, 0.0) @ decoded.iterations
    return waiting, np.where(waits, 0.0, computed) @ decoded.iterations


@lru_cache(maxsize=4096)
def _segments(workload: Workload, groups: int, slots: int) -> Segments:
    return segments(workload.lengths(groups), slots)
