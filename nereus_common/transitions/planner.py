"""The global transition DAG: which units are made from which, in what order, and in which mode (the paper's §6.1).

Nodes are placed one by one, release before acquire, ties in generation → inference → training order. A node that does
not fit beside everything waits for an executable Destroy that frees the bytes it lacks: one whose readers are all
placed, which therefore cannot depend on it. Where no such Destroy is, the node works in place. Where that does not fit
either, the target is infeasible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus_common.core.ids import DeviceId
from nereus_common.core.plan import Plan
from nereus_common.transitions.change import Change, DeviceNumbers, changes
from nereus_common.transitions.dag import PerDevice, TransitionDag
from nereus_common.transitions.needs import BUCKET_BYTES, InfeasibleTransition, Needs
from nereus_common.transitions.placing import Placing
from nereus_common.transitions.room import Room


@dataclass(frozen=True, slots=True)
class _Job:
    """What stays the same over the attempts to find an order."""

    changes: Sequence[Change]
    numbers: DeviceNumbers
    budgets: Mapping[DeviceId, int]
    occupied: Mapping[DeviceId, int]
    layers: Mapping[str, int]
    bucket_bytes: int

    def place(self, order: Sequence[Change]) -> Placing:
        room = Room(self.changes, self.numbers, self.budgets, self.occupied)
        placing = Placing(self.changes, room, self.numbers.devices, self.layers, self.bucket_bytes)
        placing.run(order)
        return placing


def plan_transition(
    old: Plan,
    new: Plan,
    needs: Needs,
    budgets: Mapping[DeviceId, int],
    *,
    occupied: Mapping[DeviceId, int] | None = None,
    layers: Mapping[str, int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransitionDag:
    """The DAG from `old` to `new`, for devices with `budgets` bytes, of which `occupied` are others'.

    `layers`: model → its number of layers, by which a pipeline split refines another or does not.
    InfeasibleTransition: no order fits memory (device and bytes are named). InvalidPlan: a device without budget, or
    plans of different model-stages.
    """
    numbers = DeviceNumbers(budgets)
    of_stages = changes(old, new, needs, numbers)
    job = _Job(of_stages, numbers, budgets, occupied or {}, layers or {}, bucket_bytes)
    placing = _first_order_that_fits(job)
    return TransitionDag(
        old,
        new,
        tuple(placing.drafts.nodes),
        placing.drafts.edges(),
        {change.old.slots[was]: change.new.slots[now] for change in of_stages for now, was in change.kept.items()},
        PerDevice(numbers.devices, placing.room.peak.tolist()),
        budgets,
    )


def _first_order_that_fits(job: _Job) -> Placing:
    """Stage order; where that leads nowhere, training first, whose units have the most to release."""
    try:
        return job.place(job.changes)
    except InfeasibleTransition as refused:
        try:
            return job.place(job.changes[::-1])
        except InfeasibleTransition:
            raise refused from None
