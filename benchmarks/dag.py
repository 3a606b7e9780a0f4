"""Planning a transition: how long it takes for 1,024 devices, and how good the order is.

`plan_ms_1024`: `plan_transition` of a PPO job of five model-stages on 1,024 devices, with its memory check of every
device, transfer programs excluded; the median of `REPEAT` runs. The devices are nearly full, so that units wait for
each other.

`makespan_gap_max`: over 100 seeded transitions of jobs that occupy at least 90% of the devices' memory, the makespan of
the planned DAG under list scheduling over the best lower bound that a solver proves (OR-Tools CP-SAT), minus 1. The
solver has the same nodes and data edges, but chooses order and waiting itself: devices' memory is a reservoir, a device
receives for one node at a time.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.dag_instances import Instance, crowded, large
from nereus_common.transitions.dag import EdgeKind, Node, Primitive, TransitionDag
from nereus_common.transitions.planner import plan_transition
from nereus_common.transitions.schedule import Spans, list_schedule, makespan, receivers

REPEAT = 200
INSTANCES = 100
SOLVER_SECONDS = 5.0
LINK_BYTES_PER_S = 25e9
SETUP_S, TEARDOWN_S = 0.5, 0.2
PLOT = Path("build/benchmarks/dag.png")


def run(*, tiny: bool = False) -> dict[str, Any]:
    seeds, repeat = (3, 3) if tiny else (INSTANCES, REPEAT)
    instance = large()
    took = planning_seconds(instance, repeat)
    dag = planned(instance)
    gaps = [gap(crowded(random.Random(seed)), 1.0 if tiny else SOLVER_SECONDS) for seed in range(seeds)]
    metrics = {
        "plan_ms_1024": statistics.median(took) * 1e3,
        "plan_ms_1024_min": min(took) * 1e3,
        "nodes_1024": len(dag.nodes),
        "resource_edges_1024": sum(edge.kind is EdgeKind.RESOURCE for edge in dag.edges),
        "makespan_gap_max": max(gaps),
        "makespan_gap_mean": statistics.mean(gaps),
        "makespan_gap_over_3_percent": sum(one > 0.03 for one in gaps) / len(gaps),
        "instances": len(gaps),
    }
    if not tiny:
        _plot(gaps, took)
    return metrics


def planned(instance: Instance) -> TransitionDag:
    return plan_transition(instance.old, instance.new, instance.needs, instance.budgets, layers=instance.layers)


def planning_seconds(instance: Instance, repeat: int) -> list[float]:
    """Wall time of each of `repeat` plannings, garbage collection between and not during them."""
    took = []
    for _ in range(repeat):
        gc.collect(0)
        gc.disable()
        start = time.perf_counter()
        planned(instance)
        took.append(time.perf_counter() - start)
        gc.enable()
    return took


def seconds_of(node: Node) -> float:
    """From bytes: the fullest target rank at the link's rate, and what it costs to set up or tear down processes."""
    if node.primitive is Primitive.DESTROY:
        return TEARDOWN_S
    return SETUP_S + node.moved / len(node.acquires) / LINK_BYTES_PER_S


def gap(instance: Instance, limit_s: float) -> float:
    """Makespan of our order over the solver's bound, minus 1."""
    from benchmarks.dag_solver import lower_bound

    dag = planned(instance)
    seconds = [seconds_of(node) for node in dag.nodes]
    bound = lower_bound(dag, seconds, instance.start_use(), limit_s)
    return makespan(scheduled(dag, seconds)) / bound - 1


def scheduled(dag: TransitionDag, seconds: Sequence[float]) -> Spans:
    return list_schedule([(edge.before, edge.after) for edge in dag.edges], receivers(dag), seconds)


def _plot(gaps: Sequence[float], took: Sequence[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    left.hist([seconds * 1e3 for seconds in took], bins=40)
    left.axvline(1.2, color="black", linestyle="--")
    left.set(xlabel="planning, 1,024 devices (ms)", ylabel="runs")
    right.plot(sorted(100 * one for one in gaps), drawstyle="steps-post")
    right.axhline(3, color="black", linestyle="--")
    right.set(xlabel="instance, by gap", ylabel="makespan over the solver's bound (%)")
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    pyplot.close(figure)
