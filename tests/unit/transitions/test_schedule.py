"""List scheduling of a transition, and its benchmark on a few instances."""

from __future__ import annotations

import random

import pytest

from benchmarks.dag import gap, planned, scheduled, seconds_of
from benchmarks.dag_instances import OCCUPANCY, crowded, occupancy
from nereus_common.transitions.dag import Primitive
from nereus_common.transitions.schedule import list_schedule, makespan

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_respects_edges_and_links_and_its_makespan_is_within_the_solvers_bound(seed: int) -> None:
    solver = pytest.importorskip("benchmarks.dag_solver", reason="needs ortools", exc_type=ImportError)
    instance = crowded(random.Random(seed))
    assert occupancy(instance) >= OCCUPANCY
    dag = planned(instance)
    seconds = [seconds_of(node) for node in dag.nodes]
    spans = scheduled(dag, seconds)
    assert all(spans[edge.after].start >= spans[edge.before].end for edge in dag.edges)
    makers = [node for node in dag.nodes if node.primitive is not Primitive.DESTROY]
    for one in makers:
        for other in makers[: one.id]:
            if one is not other and set(one.acquires) & set(other.acquires):
                assert spans[one.id].start >= spans[other.id].end or spans[other.id].start >= spans[one.id].end
    assert makespan(spans) >= solver.lower_bound(dag, seconds, instance.start_use(), 2.0) - 1e-2


@pytest.mark.parametrize("seed", [12, 63, 178, 282])
def test_what_keeps_many_links_busy_is_not_put_off_behind_many_that_keep_one_busy(seed: int) -> None:
    """Placed by their chains alone, the nodes of these jobs end 7 to 26% later than they can."""
    pytest.importorskip("benchmarks.dag_solver", reason="needs ortools", exc_type=ImportError)
    assert gap(crowded(random.Random(seed)), 5.0) < 0.03


def test_a_node_that_waits_for_two_others_is_weighed_with_those_that_wait_for_one_of_them() -> None:
    """0.1 + 0.2 and 0.3 are one moment: 5, with a long chain behind it, waits until then for both of its links."""
    seconds = [0.1, 0.2, 0.3, 1.0, 1.0, 1.0, 2.0]
    edges = [(0, 1), (1, 3), (2, 4), (1, 5), (2, 5), (5, 6)]
    links = ["", "", "", "a", "b", "ab", "c"]
    spans = list_schedule(edges, links, seconds)
    assert spans[5].start == pytest.approx(0.3) and makespan(spans) == pytest.approx(3.3)
