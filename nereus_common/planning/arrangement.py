"""A plan from the groups that a search has chosen: which devices each of them gets, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nereus_common.core.ids import ModelStage, Stage
from nereus_common.core.plan import Plan, StagePlan
from nereus_common.planning.groups import GroupOptions
from nereus_common.planning.options import StageOptions
from nereus_common.planning.pools import Block, Devices, NodePool, settle
from nereus_common.planning.question import Question
from nereus_common.planning.space import row_layout

ORDER = {stage: number for number, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What a set of model-stages, by their places in the workflow, can be on the devices of `pool`."""

    members: tuple[int, ...]
    pool: int
    options: GroupOptions


Picked = tuple[Group, int]
"""A group, and the row of its options."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """`stages`: options of every model-stage, by pool."""

    question: Question
    names: Sequence[ModelStage]
    pools: Sequence[NodePool]
    stages: Sequence[Sequence[StageOptions]]

    def plan(self, picked: Sequence[Picked]) -> Plan | None:
        """None where the groups do not fit the nodes without crossing them."""
        devices = self._devices(picked)
        if devices is None:
            return None
        stages: dict[ModelStage, StagePlan] = {}
        for (group, option), block in zip(picked, devices, strict=True):
            for member, choice in zip(group.members, group.options.rows[option], strict=True):
                stages[self.names[member]] = self._stage_plan(group.pool, member, choice, block)
        return Plan(tuple(stages.items()), self._shared(picked), self.question.staleness)

    def _devices(self, picked: Sequence[Picked]) -> list[Devices] | None:
        found: dict[int, Devices] = {}
        for number, pool in enumerate(self.pools):
            here = [place for place, (group, _) in enumerate(picked) if group.pool == number]
            blocks = [self._block(*picked[place]) for place in here]
            settled = settle(pool.nodes, blocks)
            if settled is None:
                return None
            found |= zip(here, settled, strict=True)
        return [found[place] for place in range(len(picked))]

    def _block(self, group: Group, option: int) -> Block:
        present = self.question.present
        names = [self.names[member] for member in group.members]
        now = {device for name in names if present and name in present for device in present[name].devices}
        return Block(int(group.options.used[option]), frozenset(now))

    def _stage_plan(self, pool: int, member: int, choice: int, block: Devices) -> StagePlan:
        """On the first devices of its block, or, as it is now, on those that it has."""
        name, question = self.names[member], self.question
        placements, row, knobs = self.stages[pool][member].pick(choice)
        layout, replicas = row_layout(placements, row)
        pin = question.pinned.get(name)
        layout = layout if pin is None else pin.layout
        now = question.present[name] if question.present and name in question.present else None
        stays = now is not None and (now.layout, now.replicas) == (layout, replicas) and set(now.devices) <= set(block)
        devices = now.devices if now is not None and stays else block[: layout.ranks * replicas]
        return replace(knobs, layout=layout, replicas=replicas, devices=devices)

    def _shared(self, picked: Sequence[Picked]) -> tuple[tuple[ModelStage, ...], ...]:
        """Model-stages that share devices, in the order of their phases."""
        groups = [[self.names[member] for member in group.members] for group, _ in picked]
        return tuple(
            tuple(sorted(group, key=lambda name: (ORDER[name.stage], name.model)))
            for group in sorted(groups)
            if len(group) > 1
        )
