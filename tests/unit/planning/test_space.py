"""Columns of all placements, against the placements one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from types import MappingProxyType

import numpy as np
import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import ModelStage
from nereus_common.core.layout import Layout
from nereus_common.core.plan import GenerationLimits, StagePlan
from nereus_common.planning.demand import training
from nereus_common.planning.hardware import Cluster, NodeKind, Processor
from nereus_common.planning.placements import Part, Placements, Ways
from nereus_common.planning.space import Pool, row_plan, space
from nereus_common.planning.workload import Workload
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

MODEL = ModelShape("llama", 5, 48, 96, 12, 12, 4, 264, tied=True)
GPU = Processor("chip", MappingProxyType({"float32": 1e9, "bfloat16": 4e9}), 1 << 30, 1e8)
GPUS, CORES = NodeKind(GPU, 4, 1e7, 1e6), NodeKind(replace(GPU, name="cpu"), 4, 1e7, 1e6)
TRAINING, GENERATION = ModelStage.parse("actor/training"), ModelStage.parse("actor/generation")
LIMITS = GenerationLimits(max_sequences=8)


def knobs(name: ModelStage, cluster: Cluster) -> StagePlan:
    return StagePlan(Layout(), cluster.devices[:1], generation=LIMITS if name == GENERATION else None)


@pytest.mark.parametrize("kind", [GPUS, CORES], ids=["gpus", "cores"])
@pytest.mark.parametrize("name", [TRAINING, GENERATION], ids=str)
def test_a_row_is_what_its_plan_is_alone(kind: NodeKind, name: ModelStage) -> None:
    cluster = Cluster({f"node{number}": kind for number in range(2)})
    rows = space(MODEL, name, Pool(kind, 7), knobs(name, cluster))
    plans = [row_plan(rows, row, knobs(name, cluster), cluster.devices) for row in range(len(rows.tp))]
    assert len(set(plans)) == len(plans) > 10
    alone = Placements.of(MODEL, name, plans, cluster)
    for field in fields(Placements):
        ours, theirs = getattr(rows, field.name), getattr(alone, field.name)
        if isinstance(ours, np.ndarray | Part | Ways):
            np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=field.name)


def test_every_placement_that_fits_is_there() -> None:
    cluster = Cluster({f"node{number}": GPUS for number in range(2)})
    rows = space(MODEL, TRAINING, Pool(GPUS, 6), knobs(TRAINING, cluster))
    found = {tuple(map(int, row)) for row in zip(rows.tp, rows.pp, rows.fs, rows.replicas, strict=True)}
    wanted = {
        (tp, pp, fs, replicas)
        for tp in (1, 2, 3, 4)
        for pp in range(1, 6)
        for fs in range(1, 7)
        for replicas in range(1, 7)
        if tp * pp * fs * replicas <= 6 and (4 % tp == 0 or tp * pp * fs * replicas <= 4)
    }
    assert found == wanted


def test_a_tensor_group_never_crosses_nodes() -> None:
    rows = space(MODEL, TRAINING, Pool(GPUS, 8), knobs(TRAINING, Cluster({"node0": GPUS})))
    assert (rows.tensor.kind < 2).all()


def test_all_of_them_are_priced_at_once() -> None:
    work = Workload(64, 4, 20, (10.0, 30.0))
    rows = space(MODEL, TRAINING, Pool(GPUS, 8), knobs(TRAINING, Cluster({"node0": GPUS})))
    assert all(
        seconds.shape == rows.tp.shape and np.isfinite(seconds).all() for seconds in training(rows, work).values()
    )


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Pool(GPUS, 0)
