"""All placements of one model-stage on the first devices of a pool, as columns.

A pool's devices are taken in its order, node by node, so tensor groups stay within a node, and the others cross as few
nodes as they can. Its nodes are of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Recompute, StagePlan
from nereus_common.planning.hardware import Link, NodeKind
from nereus_common.planning.placements import LINKS, NO_LIMITS, Column, Part, Placements, Ways, parts_of
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import convention_of
from nereus_common.state.dtypes import item_bytes

Degrees = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pool:
    """`devices` in nodes of one `kind`, all of them full but perhaps the last."""

    kind: NodeKind
    devices: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InvalidInput(f"a pool of {self.devices} devices", remedy="at least one", field="pool")


def space(model: ModelShape, name: ModelStage, pool: Pool, knobs: StagePlan) -> Placements:
    """Every (tp, pp, fs, replicas) that fits the pool and the model; what `knobs` says beside its layout holds for all.

    Generation decodes in one pipeline stage, on whole copies (fs 1).
    """
    tp, pp, fs, replicas = _degrees(model, name, pool)
    ranks, used = tp * pp * fs, tp * pp * fs * replicas
    limits, processor = knobs.generation or NO_LIMITS, pool.kind.processor
    shared = np.minimum(used, pool.kind.devices) if processor.name == "cpu" else np.ones_like(used)

    def same(value: float) -> Column:
        return np.full(len(tp), float(value))

    def ways(group: Degrees) -> Ways:
        return _ways(group, used, pool.kind)

    busiest, last = _parts(model, name.stage, tp, pp)
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


def _degrees(model: ModelShape, name: ModelStage, pool: Pool) -> tuple[Degrees, Degrees, Degrees, Degrees]:
    generates = name.stage is Stage.GENERATION
    allowed = convention_of(name.stage).allowed_tp(model)
    widths = [tp for tp in allowed if tp <= min(pool.kind.devices, pool.devices)]
    rows = []
    for tp in widths:
        for pp in range(1, 2 if generates else min(model.layers, pool.devices // tp) + 1):
            copies = pool.devices // (tp * pp)
            fs, replicas = _products(1 if generates else copies, copies)
            rows.append(np.stack([np.full_like(fs, tp), np.full_like(fs, pp), fs, replicas]))
    tp, pp, fs, replicas = np.concatenate(rows, axis=1)
    whole = _within_nodes(tp, tp * pp * fs * replicas, pool.kind)
    return tp[whole], pp[whole], fs[whole], replicas[whole]


def _products(most: int, limit: int) -> tuple[Degrees, Degrees]:
    """All (a, b) with a ≤ most and a · b ≤ limit."""
    counts = limit // np.arange(1, most + 1)
    first = np.repeat(np.arange(1, most + 1), counts)
    second = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return first, second


def _parts(model: ModelShape, stage: Stage, tp: Degrees, pp: Degrees) -> tuple[Part, Part]:
    """Looked up once for each pair of degrees."""
    pairs, row = np.unique(np.stack([tp, pp]), axis=1, return_inverse=True)
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
    tp, pp, fs, replicas = (
        int(values[row]) for values in (placements.tp, placements.pp, placements.fs, placements.replicas)
    )
    used = devices[: tp * pp * fs * replicas]
    return replace(knobs, layout=Layout(tp, pp, fs), replicas=replicas, devices=used)
