"""A lower bound of a transition's makespan by OR-Tools CP-SAT: resource-constrained scheduling of the DAG's nodes.

Kept of the DAG: the nodes, their modes and durations, the data edges. Free: every start, and who waits for whose
memory. A device's memory is a reservoir that may not rise above its budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from ortools.sat.python import cp_model

from nereus_common.core.ids import DeviceId
from nereus_common.transitions.dag import EdgeKind, Node, Primitive, TransitionDag

TICKS_PER_S = 1000
MIB = 1 << 20


class UnsolvedInstance(RuntimeError):
    """The solver found not even a bound."""


def lower_bound(dag: TransitionDag, seconds: Sequence[float], use: Mapping[DeviceId, int], limit_s: float) -> float:
    """Seconds below which no order of the nodes can end, the best the solver proves within `limit_s`."""
    model = cp_model.CpModel()
    ticks = [round(each * TICKS_PER_S) for each in seconds]
    horizon = sum(ticks)
    starts = [model.new_int_var(0, horizon - length, f"start{number}") for number, length in enumerate(ticks)]
    for before, after, kind in dag.edges:
        if kind is EdgeKind.DATA:
            model.add(starts[after] >= starts[before] + ticks[before])
    _links(model, dag, starts, ticks)
    _memory(model, dag, starts, ticks, use)
    end = model.new_int_var(0, horizon, "end")
    for start, length in zip(starts, ticks, strict=True):
        model.add(end >= start + length)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    if solver.solve(model) in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID):
        raise UnsolvedInstance("the solver finds no order where the planner found one")
    bound = solver.best_objective_bound
    if bound <= 0:
        raise UnsolvedInstance(f"no bound within {limit_s} s")
    return float(bound) / TICKS_PER_S


def _links(model: Any, dag: TransitionDag, starts: Sequence[Any], ticks: Sequence[int]) -> None:
    """A device receives for one node at a time; devices with the same nodes need one constraint."""
    users: dict[DeviceId, list[int]] = defaultdict(list)
    for node in dag.nodes:
        if node.primitive is not Primitive.DESTROY:
            for device in node.acquires:
                users[device].append(node.id)
    for numbers in {tuple(numbers) for numbers in users.values() if len(numbers) > 1}:
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[number], ticks[number], f"link{number}") for number in numbers]
        )


def _memory(
    model: Any, dag: TransitionDag, starts: Sequence[Any], ticks: Sequence[int], use: Mapping[DeviceId, int]
) -> None:
    """Reservoirs in MiB, needs rounded down and room up, so that the bound stays one."""
    changes: dict[DeviceId, list[tuple[int, bool, int]]] = defaultdict(list)
    for node in dag.nodes:
        for device, at_end, size in _changes(node):
            changes[device].append((node.id, at_end, size))
    seen = set()
    for device, of_device in changes.items():
        room = -(-(dag.budgets[device] - use.get(device, 0)) // MIB)
        key = (room, tuple(of_device))
        if key in seen or sum(size for _, _, size in of_device if size > 0) <= room:
            continue
        seen.add(key)
        times = [starts[number] + (ticks[number] if at_end else 0) for number, at_end, _ in of_device]
        sizes = [size for _, _, size in of_device]
        model.add_reservoir_constraint(times, sizes, min(0, -sum(map(abs, sizes))), room)


def _changes(node: Node) -> list[tuple[DeviceId, bool, int]]:
    """(device, whether at the end, MiB more in use). What an in-place node frees counts from its start."""
    taken = [(device, False, size // MIB) for device, size in node.acquires.items()]
    at_end = node.primitive is Primitive.DESTROY
    return taken + [(device, at_end, -ceil(size / MIB)) for device, size in node.frees.items()]
