"""What changes in each model-stage between two plans: which units end, which come, which are kept, and their bytes.

Devices are numbered once, so that the memory check is arithmetic on columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.transitions.dag import Side, UnitSlot
from nereus_common.transitions.needs import Needs

Column = NDArray[np.int64]
STAGE_ORDER = {stage: place for place, stage in enumerate(Stage)}


class DeviceNumbers:
    """Device ↔ number. Plans made over one pool share its DeviceId objects: those are known by identity, others by
    equality."""

    def __init__(self, devices: Iterable[DeviceId]) -> None:
        self.devices = tuple(devices)
        self._by_identity = dict(zip(map(id, self.devices), range(len(self.devices)), strict=True))
        self._by_value: dict[DeviceId, int] = {}

    def __getitem__(self, device: DeviceId) -> int:
        if not self._by_value:
            self._by_value = {device: number for number, device in enumerate(self.devices)}
        if device not in self._by_value:
            raise InvalidPlan(
                f"the plan uses {device}, which has no budget",
                remedy="declare that device",
                field="plan",
                device=device,
            )
        return self._by_value[device]

    def column(self, devices: tuple[DeviceId, ...]) -> Column:
        first = self._by_identity.get(id(devices[0]), 0)
        if self.devices[first : first + len(devices)] == devices:  # plans are cut from the pool in runs
            return np.arange(first, first + len(devices))
        numbers = list(map(self._by_identity.get, map(id, devices)))
        if None in numbers:
            return np.array([self[device] for device in devices], np.int64)
        return np.array(numbers, np.int64)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model-stage in one plan, numbered from `first` on: no two units of a transition share a number.

    `places`: device number of (replica, rank); the rest per rank.
    """

    plan: StagePlan
    first: int
    slots: tuple[UnitSlot, ...]
    places: Column
    state: Column
    total: Column
    asleep: Column
    totals: tuple[int, ...]
    unit_state: int
    """Bytes of state of a whole unit, over all its ranks."""

    @property
    def numbers(self) -> slice:
        return slice(self.first, self.first + self.plan.replicas)


@dataclass(slots=True)
class Change:
    """Of one model-stage, the `row`-th of the transition. `kept`: new replica → old replica; `ending`, `coming`:
    replicas of the old and new plan.

    `trained`: some model-stage trains this model, so generation and inference units are filled by its weight sync.
    """

    row: int
    model_stage: ModelStage
    trained: bool
    old: Units
    new: Units
    kept: Mapping[int, int]
    ending: tuple[int, ...] = field(init=False)
    coming: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        staying = set(self.kept.values())
        self.ending = tuple(replica for replica in range(self.old.plan.replicas) if replica not in staying)
        self.coming = tuple(replica for replica in range(self.new.plan.replicas) if replica not in self.kept)

    @property
    def stage(self) -> Stage:
        return self.model_stage.stage

    @property
    def holds_alone(self) -> bool:
        """Whether only this model-stage's units hold its state, so that one of them must be intact at any time."""
        return self.stage is Stage.TRAINING or not self.trained


def changes(old: Plan, new: Plan, needs: Needs, numbers: DeviceNumbers) -> list[Change]:
    """One per model-stage, in the order that breaks ties: generation, inference, training. InvalidPlan where the plans
    have not the same model-stages."""
    if old.names != new.names:
        other = sorted({*old.names} ^ {*new.names})[0]
        raise InvalidPlan(
            f"only one of the two plans has {other}",
            remedy="a transition changes how model-stages run, not which there are",
            field=f"stages.{other}",
        )
    trained = {name.model for name in old.names if name.stage is Stage.TRAINING}
    pairs = [(name, was, is_now) for (name, was), (_, is_now) in zip(old.stages, new.stages, strict=True)]
    pairs.sort(key=lambda pair: (STAGE_ORDER[pair[0].stage], pair[0].model))
    found: list[Change] = []
    units = 0
    for row, (name, before, after) in enumerate(pairs):
        was = _units(name, Side.OLD, before, units, needs, numbers)
        is_now = _units(name, Side.NEW, after, units + before.replicas, needs, numbers)
        units += before.replicas + after.replicas
        found.append(Change(row, name, name.model in trained, was, is_now, _kept(name, was, is_now)))
    return found


def _units(name: ModelStage, side: Side, plan: StagePlan, first: int, needs: Needs, numbers: DeviceNumbers) -> Units:
    ranks = plan.layout.ranks
    bytes_of = [needs(name, plan, rank) for rank in range(ranks)]
    totals = tuple(need.state + need.rest for need in bytes_of)
    return Units(
        plan,
        first,
        tuple([UnitSlot(name, side, replica) for replica in range(plan.replicas)]),
        numbers.column(plan.devices).reshape(plan.replicas, ranks),
        np.array([need.state for need in bytes_of], np.int64),
        np.array(totals, np.int64),
        np.array([need.asleep for need in bytes_of], np.int64),
        totals,
        sum(need.state for need in bytes_of),
    )


def _kept(name: ModelStage, old: Units, new: Units) -> dict[int, int]:
    """New replica → old replica, of units whose processes go on as they are."""
    if name.stage is Stage.TRAINING:
        return {replica: replica for replica in range(old.plan.replicas)} if old.plan == new.plan else {}
    if old.plan.layout != new.plan.layout:
        return {}
    if replace(old.plan, devices=new.plan.devices, replicas=new.plan.replicas) != new.plan:
        return {}
    there = {row.tobytes(): replica for replica, row in enumerate(old.places)}
    rows = ((replica, there.get(row.tobytes())) for replica, row in enumerate(new.places))
    return {replica: was for replica, was in rows if was is not None}
