"""Who is killed at which point of which transition, and what is promised then: derived from the DAGs.

A transition leads from one of a pair of layouts of a model-stage to the other, whichever of them is in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import GenerationLimits, Plan, StagePlan
from nereus_common.transitions.dag import Mode, Node, TransitionDag
from nereus_common.transitions.lifecycle import NodeState, TransitionState
from nereus_common.transitions.needs import RankNeed
from nereus_common.transitions.planner import plan_transition
from tests.system.job_specs import LIMITS
from tests.system.struck_coordinator import AFTER_COMMIT, BEFORE_COMMIT, BUCKET_BYTES, RELEASING

Place = tuple[str, tuple[str, ...]]
"""Layout and slots."""
ROUNDS = 3
"""Every in-place move of these pairs has at least as many."""
STATE, REST = 6 * BUCKET_BYTES, 8 * BUCKET_BYTES
"""Bytes of the pure DAGs: of all state of a unit, and of a rank beside it."""


class Who(StrEnum):
    NEW = "new worker"
    OLD = "old worker"
    SERVICE = "stage service"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Pair:
    """Two places of a model-stage. In place: cpu1 has no room for both."""

    name: str
    stage: ModelStage
    places: tuple[Place, Place]
    mode: Mode = Mode.SHADOW

    def plan(self, place: Place) -> Plan:
        layout, replicas = parse_replicated(place[0])
        devices = tuple(DeviceId("node0", slot) for slot in place[1])
        limits = GenerationLimits(**LIMITS) if self.stage == GENERATION else None
        return Plan(((self.stage, StagePlan(layout, devices, replicas, generation=limits)),))

    def dag(self) -> TransitionDag:
        """From the first place to the second."""
        old, new = map(self.plan, self.places)

        def needs(name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
            return RankNeed(STATE // stage.layout.ranks, REST)

        budgets = dict.fromkeys({*old.devices, *new.devices}, 1 << 40)
        if self.mode is Mode.IN_PLACE:
            budgets[DeviceId("node0", "cpu1")] = tight(needs(self.stage, old[self.stage], 0), REST)
        return plan_transition(old, new, needs, budgets, bucket_bytes=BUCKET_BYTES)


def tight(old: RankNeed, rest: int) -> int:
    """The budget of a device that a rank can only leave in place, half of its state for one that takes its place with
    `rest` beside it."""
    return old.rest + rest + old.state + 2 * BUCKET_BYTES


TRAINING, GENERATION = ModelStage.parse("actor/training"), ModelStage.parse("actor/generation")
HOME: Place = ("tp1.pp1.fs1", ("cpu1",))
PAIRS = (
    Pair("in-place", TRAINING, (HOME, ("tp1.pp1.fs2", ("cpu1", "cpu2"))), Mode.IN_PLACE),
    Pair("shadow", TRAINING, (HOME, ("tp2.pp1.fs1", ("cpu2", "cpu3")))),
    Pair("generation", GENERATION, (("tp1.pp1.fs1", ("cpu0",)), ("tp1.pp1.fs1", ("cpu4",)))),
)


Promise = Mapping[TransitionState, bool]
"""How the transition may end, and whether the job then goes back to a checkpoint."""
UNDONE: Promise = {TransitionState.UNDONE: False}
COMMITTED: Promise = {TransitionState.DONE: False}
COMMITTED_AND_LOST: Promise = {TransitionState.DONE: True}
LOST: Promise = {TransitionState.LOST: True}
UNDONE_AND_LOST: Promise = {TransitionState.UNDONE: True}
"""The transition had taken nothing from the units that were lost."""
PREPARATION = (str(TransitionState.PREPARING), str(TransitionState.PREPARED))
COMMIT = (BEFORE_COMMIT, AFTER_COMMIT, str(TransitionState.COMMITTED), RELEASING)


@dataclass(frozen=True)
class Case:
    pair: Pair
    who: Who
    point: str

    def __str__(self) -> str:
        return f"{self.pair.name}: {self.who} at {self.point}".replace(" ", "-")

    @property
    def promise(self) -> Promise:
        """What DESIGN promises. Nobody looks after the units between the last sync and the commit: what dies there is
        missed by the job under its new plan."""
        if self.who is Who.COORDINATOR:
            return COMMITTED if self.point in COMMIT[1:] else UNDONE
        if self.point in COMMIT:
            return COMMITTED if self.who is Who.OLD else COMMITTED_AND_LOST
        if self.point in PREPARATION:
            return UNDONE if self.who is Who.NEW else {**UNDONE_AND_LOST, **self._if_the_step_is_over()}
        return self._while_moving()

    def _if_the_step_is_over(self) -> Promise:
        """A step that still needs whoever died is where the job misses him; else the transition is."""
        if self.pair.stage == TRAINING:
            return LOST
        return COMMITTED if self.who is Who.OLD else {}

    def _while_moving(self) -> Promise:
        moves = self.pair.stage == TRAINING
        if self.who is Who.OLD and (not moves or self.point.endswith(NodeState.DONE)):
            return COMMITTED  # nobody reads it any more
        if self.who is Who.NEW:
            drained = self.pair.mode is Mode.IN_PLACE and not self.point.endswith((NodeState.RUNNING, "moving"))
            return LOST if drained else UNDONE
        return LOST if moves else UNDONE_AND_LOST


def cases_of(pair: Pair) -> Iterator[Case]:
    """Every point of its DAG, with everybody who is there then."""
    for point in points(pair.dag()):
        for who in Who:
            if who is Who.NEW and pair.mode is Mode.IN_PLACE and point in (*PREPARATION, "moving"):
                continue  # it is not begun before its node is
            if who is Who.OLD and point == RELEASING:
                continue  # it is the one that was released
            yield Case(pair, who, point)


def points(dag: TransitionDag) -> Iterator[str]:
    """In the order of time: what is recorded of the transition, and of each node that comes before its commit."""
    yield from PREPARATION
    yield str(TransitionState.MOVING)
    for node in (node for node in dag.nodes if node.targets):
        yield f"node {node.id} {NodeState.RUNNING}"
        yield from _rounds(node)
        yield f"node {node.id} {NodeState.DONE}"
    yield from COMMIT


def _rounds(node: Node) -> Iterator[str]:
    if node.mode is Mode.IN_PLACE:
        for number in range(1, ROUNDS + 1):
            yield f"node {node.id} round {number}"


CASES = tuple(case for pair in PAIRS for case in cases_of(pair))
