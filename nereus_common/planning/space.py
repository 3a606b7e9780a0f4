"""All placements of one model-stage on the first devices of a pool, as columns.

A pool's devices are taken in its order, node by node, so tensor groups stay within a node, and the others cross as few
nodes as they can. Its nodes are of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Recompute, StagePlan
from nereus_common.planning.hardware import CPU, Link, NodeKind
from nereus_common.planning.placements import LINKS, NO_LIMITS, Column, Part, Placements, Ways, parts_of
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import convention_of
from nereus_common.state.dtypes import item_bytes

Degrees = NDArray[np.int64]
COARSE = 4
"""From twice so many nodes on, not every number of them is looked at: steps are this part of them."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`devices` in nodes of one `kind`, all of them full but perhaps the last."""

    kind: NodeKind
    devices: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InvalidInput(f"a pool of {self.devices} devices", remedy="at least one", field="pool")


def space(
    model: ModelShape, name: ModelStage, pool: Pool, knobs: StagePlan, counts: Sequence[int] | None = None
) -> Placements:
    """Every (tp, pp, fs, replicas) that uses one of `counts` devices, by default any number that the pool has, and fits
    the model; what `knobs` says beside its layout holds for all.

    Generation decodes in one pipeline stage, on whole copies (fs 1).
    """
    wanted = tuple(range(1, pool.devices + 1) if counts is None else counts)
    tp, pp, fs, replicas = _degrees(model, name.stage, pool.kind.devices, wanted)
    ranks, used = tp * pp * fs, tp * pp * fs * replicas
    limits, processor = knobs.generation or NO_LIMITS, pool.kind.processor
    shared = np.minimum(used, pool.kind.devices) if processor.name == CPU else np.ones_like(used)

    def same(value: float) -> Column:
        return np.full(len(tp), float(value))

    def ways(group: Degrees) -> Ways:
        return _ways(group, used, pool.kind)

    busiest, last = _parts(model, name.stage, *(tuple(degrees.tolist()) for degrees in (tp, pp)))
    return Placements(
        model=model,
        name=name,
        tp=tp.astype(float),
        pp=pp.astype(float),
        fs=fs.astype(float),
        replicas=replicas.astype(float),
        microbatch=same(knobs.microbatch_tokens),
        recompute=same(knobs.recompute is Recompute.FULL),
        item=same(item_bytes(knobs.dtypes.compute)),
        master_item=same(item_bytes(knobs.dtypes.master)),
        kv_item=same(item_bytes(knobs.dtypes.kv)),
        sequences=same(limits.max_sequences),
        batched=same(limits.max_batched_tokens),
        kv_bytes=same(limits.kv_bytes),
        busiest=busiest,
        last=last,
        peak=processor.peak(knobs.dtypes.compute) / shared,
        stream=processor.memory_rate / shared,
        tensor=ways(tp),
        shards=ways(tp * fs),
        unit=ways(ranks),
        everyone=ways(used),
    )


def levels(pool: Pool) -> tuple[int, ...]:
    """How many devices a search lets a group of model-stages have: any number of a lone node's; else what divides a
    node, then whole nodes, in steps of a quarter where there are many."""
    width = min(pool.kind.devices, pool.devices)
    inside = [count for count in range(1, width + 1) if width == pool.devices or width % count == 0]
    nodes, found = 2, []
    while nodes * pool.kind.devices <= pool.devices:
        found.append(nodes * pool.kind.devices)
        nodes += max(1, nodes // COARSE)
    return tuple(sorted({*inside, *found, pool.devices}))


@lru_cache(maxsize=1024)
def _degrees(
    model: ModelShape, stage: Stage, node: int, counts: tuple[int, ...]
) -> tuple[Degrees, Degrees, Degrees, Degrees]:
    deepest = 1 if stage is Stage.GENERATION else model.layers
    rows = [
        (tp, pp, fs, copies // fs)
        for tp in convention_of(stage).allowed_tp(model)
        for count in counts
        if tp <= node and count % tp == 0 and (count <= node or node % tp == 0)
        for pp in _divisors(count // tp, deepest)
        for copies in (count // (tp * pp),)
        for fs in _divisors(copies, 1 if stage is Stage.GENERATION else copies)
    ]
    tp, pp, fs, replicas = np.array(rows, np.int64).reshape(-1, 4).T
    return tp, pp, fs, replicas


@lru_cache(maxsize=65536)
def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Ascending, up to `most`."""
    return tuple(one for one in range(1, min(number, most) + 1) if number % one == 0)


@lru_cache(maxsize=256)
def _parts(model: ModelShape, stage: Stage, tp: tuple[int, ...], pp: tuple[int, ...]) -> tuple[Part, Part]:
    """Looked up once for each pair of degrees."""
    pairs, row = np.unique(np.array([tp, pp]), axis=1, return_inverse=True)
    found = [parts_of(model, stage, Layout(int(width), int(depth))) for width, depth in pairs.T]
    sides = (np.array(side, float).T[:, row.reshape(-1)] for side in zip(*found, strict=True))
    busiest, last = (Part(*side) for side in sides)
    return busiest, last


def _ways(group: Degrees, used: Degrees, kind: NodeKind) -> Ways:
    near, one = _within_nodes(group, used, kind), group == 1
    links = np.where(one, LINKS.index(Link.DEVICE), np.where(near, LINKS.index(Link.NODE), LINKS.index(Link.NETWORK)))
    far = np.minimum(kind.inside, kind.outside / np.minimum(used, kind.devices))
    return Ways(links, np.where(one, kind.processor.memory_rate, np.where(near, kind.inside, far)))


def _within_nodes(group: Degrees, used: Degrees, kind: NodeKind) -> NDArray[np.bool_]:
    """Whether no group of neighbours is cut by the end of a node."""
    return np.asarray((used <= kind.devices) | (kind.devices % group == 0))


def row_plan(placements: Placements, row: int, knobs: StagePlan, devices: tuple[DeviceId, ...]) -> StagePlan:
    """The plan of a row, on the first of `devices`."""
    layout, replicas = row_layout(placements, row)
    return replace(knobs, layout=layout, replicas=replicas, devices=devices[: layout.ranks * replicas])


def row_layout(placements: Placements, row: int) -> tuple[Layout, int]:
    """Layout and replicas of a row."""
    degrees = placements.tp, placements.pp, placements.fs, placements.replicas
    tp, pp, fs, replicas = (int(values[row]) for values in degrees)
    return Layout(tp, pp, fs), replicas


def with_knobs(placements: Placements, knobs: StagePlan) -> Placements:
    """The same placements with another budget of tokens, recomputation and limits."""
    like, limits = np.ones_like(placements.tp), knobs.generation or NO_LIMITS
    return replace(
        placements,
        microbatch=like * knobs.microbatch_tokens,
        recompute=like * (knobs.recompute is Recompute.FULL),
        sequences=like * limits.max_sequences,
        batched=like * limits.max_batched_tokens,
        kv_bytes=like * limits.kv_bytes,
    )
