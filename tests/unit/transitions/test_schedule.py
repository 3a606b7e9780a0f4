"""List scheduling of a transition, and its benchmark on a few instances."""

from __future__ import annotations

import random

import pytest

from benchmarks.dag import planned, seconds_of
from benchmarks.dag_instances import OCCUPANCY, crowded, occupancy
from nereus_common.transitions.dag import Primitive
from nereus_common.transitions.schedule import list_schedule, makespan

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_respects_edges_and_links_and_its_makespan_is_within_the_solvers_reach(seed: int) -> None:
    solver = pytest.importorskip("benchmarks.dag_solver", reason="needs ortools", exc_type=ImportError)
    instance = crowded(random.Random(seed))
    assert occupancy(instance) >= OCCUPANCY
    dag = planned(instance)
    seconds = [seconds_of(node) for node in dag.nodes]
    spans = list_schedule(dag, seconds)
    assert all(spans[edge.after].start >= spans[edge.before].end for edge in dag.edges)
    makers = [node for node in dag.nodes if node.primitive is not Primitive.DESTROY]
    for one in makers:
        for other in makers[: one.id]:
            if one is not other and set(one.acquires) & set(other.acquires):
                assert spans[one.id].start >= spans[other.id].end or spans[other.id].start >= spans[one.id].end
    assert makespan(spans) >= solver.lower_bound(dag, seconds, instance.start_use(), 2.0) - 1e-2
