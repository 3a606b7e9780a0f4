"""Placements of one model-stage as columns, one row each, so that thousands of candidates are priced in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, Recompute, StagePlan
from nereus_common.planning.counts import rank_shape
from nereus_common.planning.hardware import Cluster, Link
from nereus_common.state.architecture import ModelShape
from nereus_common.state.boxes import elements
from nereus_common.state.conventions import convention_of
from nereus_common.state.dtypes import item_bytes
from nereus_common.state.oracle import shard_boxes

Column = NDArray[np.float64]
LINKS = tuple(Link)
NO_LIMITS = GenerationLimits()


class Part(NamedTuple):
    """A pipeline stage: multiply-adds of a rank for each row, predicting row and pair (`counts.RankShape`), its layers,
    and the parameters that it holds once they are gathered over fs. Numbers, or columns of them."""

    body: Column
    head: Column
    pair: Column
    experts: Column
    layers: Column
    held: Column


class Ways(NamedTuple):
    """How the ranks of a group reach each other, by row. `kind`: place in LINKS; `rate`: bytes per second of a rank."""

    kind: NDArray[np.int64]
    rate: Column


@dataclass(frozen=True, slots=True, eq=False)
class Placements:
    """`busiest`: the pipeline stage with the most layers; `last`: the one with the head. `peak`, `stream`: operations
    and bytes of memory per second of the slowest rank. `tensor`, `shards`, `unit`, `everyone`: the ways within a tensor
    group, a pipeline stage, a unit and the model-stage. `item`, `master_item`, `kv_item`: bytes of an element in
    compute, in the optimizer's masters and in the KV cache.
    """

    model: ModelShape
    name: ModelStage
    tp: Column
    pp: Column
    fs: Column
    replicas: Column
    microbatch: Column
    recompute: Column
    item: Column
    master_item: Column
    kv_item: Column
    sequences: Column
    batched: Column
    kv_bytes: Column
    busiest: Part
    last: Part
    peak: Column
    stream: Column
    tensor: Ways
    shards: Ways
    unit: Ways
    everyone: Ways

    @classmethod
    def of(cls, model: ModelShape, name: ModelStage, plans: Sequence[StagePlan], cluster: Cluster) -> Placements:
        """InvalidPlan, NotFound: a layout does not fit the model, or a device is not of the cluster."""
        layouts, limits = [plan.layout for plan in plans], [plan.generation or NO_LIMITS for plan in plans]
        slowest, sharing = [_slowest(plan, cluster) for plan in plans], column(map(_sharing, plans))
        processors = [cluster.kind(device).processor for device in slowest]
        found = [parts_of(model, name.stage, layout) for layout in layouts]

        def ways(counts: Sequence[int]) -> Ways:
            rows = zip(plans, slowest, counts, strict=True)
            pairs = [_way(cluster, plan, device, count) for plan, device, count in rows]
            return Ways(np.array([LINKS.index(link) for link, _ in pairs], np.int64), column(rate for _, rate in pairs))

        busiest, last = (Part(*map(column, zip(*side, strict=True))) for side in zip(*found, strict=True))
        return cls(
            model,
            name,
            column(layout.tp for layout in layouts),
            column(layout.pp for layout in layouts),
            column(layout.fs for layout in layouts),
            column(plan.replicas for plan in plans),
            column(plan.microbatch_tokens for plan in plans),
            column(plan.recompute is Recompute.FULL for plan in plans),
            column(item_bytes(plan.dtypes.compute) for plan in plans),
            column(item_bytes(plan.dtypes.master) for plan in plans),
            column(item_bytes(plan.dtypes.kv) for plan in plans),
            column(one.max_sequences for one in limits),
            column(one.max_batched_tokens for one in limits),
            column(one.kv_bytes for one in limits),
            busiest,
            last,
            column(one.peak(plan.dtypes.compute) for one, plan in zip(processors, plans, strict=True)) / sharing,
            column(one.memory_rate for one in processors) / sharing,
            ways([layout.tp for layout in layouts]),
            ways([layout.tp * layout.fs for layout in layouts]),
            ways([layout.ranks for layout in layouts]),
            ways([len(plan.devices) for plan in plans]),
        )

    @property
    def data_parallel(self) -> Column:
        return self.fs * self.replicas

    @property
    def held(self) -> Column:
        """Parameters of the fullest rank, gathered over fs."""
        return np.maximum(self.busiest.held, self.last.held)

    @property
    def position_bytes(self) -> Column:
        """Of a rank's KV cache, for one position."""
        heads = np.maximum(1, self.model.kv_heads // self.tp)
        return 2 * heads * self.model.head_dim * self.model.layers * self.kv_item


def column(values: Iterable[float]) -> Column:
    return np.array(list(values), np.float64)


@lru_cache(maxsize=4096)
def parts_of(model: ModelShape, stage: Stage, layout: Layout) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The busiest pipeline stage without the head, and the last one, which has it: the same where there is one."""
    plain = Layout(layout.tp, layout.pp, split=layout.split)
    counts = plain.layer_counts(model.layers)
    busiest = max(range(max(1, plain.pp - 1)), key=lambda number: counts[number])
    found = []
    for number in (busiest, plain.pp - 1):
        boxes = shard_boxes(model, plain, number * plain.tp, convention_of(stage))
        shape = rank_shape(model, stage, plain, number)
        held = sum(elements(region) for region in boxes.values())
        found.append((shape.body, shape.head, shape.pair, shape.experts, float(counts[number]), float(held)))
    return found[0], found[1]


def _slowest(plan: StagePlan, cluster: Cluster) -> DeviceId:
    """The device that all others wait for."""
    return min(plan.devices, key=lambda device: cluster.kind(device).processor.peak(plan.dtypes.compute))


def _sharing(plan: StagePlan) -> int:
    """How many ranks share what each of them computes with: those on CPU devices of one node do."""
    nodes = Counter(device.node for device in plan.devices if device.slot.startswith("cpu"))
    return max(nodes.values(), default=1)


def _way(cluster: Cluster, plan: StagePlan, device: DeviceId, count: int) -> tuple[Link, float]:
    """Among each `count` neighbouring ranks, the furthest of all, when all on the node of `device` send at once."""
    groups = (plan.devices[start : start + count] for start in range(0, len(plan.devices), count))
    link = max(map(cluster.link, groups), key=LINKS.index)
    return link, cluster.rate(device, link, sum(one.node == device.node for one in plan.devices))
