"""What crosses which link in a transition, and how long that takes at given rates.

A link is a pair of devices. Bytes follow from the two plans alone, by the layouts and the compiler that the move uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nereus_common.core.ids import DeviceId, ModelStage, Stage
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import RankRef
from nereus_common.state.architecture import ModelShape
from nereus_common.state.conventions import convention_of
from nereus_common.state.distance import device_distance
from nereus_common.state.oracle import RankBoxes, optimizer_tensors, unit_boxes
from nereus_common.state.program import compile_program
from nereus_common.transitions.dag import Node, Side, TransitionDag, UnitSlot

STATE_DTYPE = "float32"
"""In which training state is held and moved."""


class Phase(StrEnum):
    MOVE = "move"
    """State that only the old units of its model-stage hold."""
    SYNC = "sync"
    """Weights that the training units send to every other unit of their model."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """`bytes` that `target` receives from `source` in `phase`; `distance` as in `state.distance`."""

    source: DeviceId
    target: DeviceId
    phase: Phase
    bytes: int
    distance: int


def traffic(dag: TransitionDag, shapes: Mapping[str, ModelShape]) -> tuple[LinkTraffic, ...]:
    """Of all nodes, the fullest link first. `shapes`: model → its shape.

    Units that stay take part in the weight sync as at every step: their bytes are not counted.
    """
    found: dict[tuple[DeviceId, DeviceId, Phase], int] = defaultdict(int)
    distances: dict[tuple[DeviceId, DeviceId, Phase], int] = {}
    for node in dag.nodes:
        for link in _of_node(dag, node, shapes) if node.targets else ():
            key = link.source, link.target, link.phase
            found[key] += link.bytes
            distances[key] = link.distance
    links = (LinkTraffic(*key, size, distances[key]) for key, size in found.items())
    return tuple(sorted(links, key=lambda link: (-link.bytes, link.source, link.target)))


def predicted_seconds(links: Iterable[LinkTraffic], rates: Mapping[int, float]) -> dict[Phase, float]:
    """By phase, the time of the busiest device, which receives, and sends, one link after another.

    `rates`: bytes per second by distance; a link that is nearer than any measured one counts as that one. A phase with
    a link farther than any measured one is left out.
    """
    busy: dict[Phase, dict[tuple[DeviceId, str], float]] = defaultdict(lambda: defaultdict(float))
    unknown: set[Phase] = set()
    for link in links:
        measured = [distance for distance in rates if distance >= link.distance]
        if not measured:
            unknown.add(link.phase)
            continue
        rate = rates[min(measured)]
        for end in ((link.source, "sends"), (link.target, "receives")):
            busy[link.phase][end] += link.bytes / rate
    return {phase: max(ends.values()) for phase, ends in sorted(busy.items()) if phase not in unknown}


def _of_node(dag: TransitionDag, node: Node, shapes: Mapping[str, ModelShape]) -> Iterator[LinkTraffic]:
    name, shape = node.model_stage, shapes[node.model_stage.model]
    trains = name.stage is Stage.TRAINING
    phase = Phase.MOVE if trains or (node.sources and not _is_trained(dag, name)) else Phase.SYNC
    tensors = {**shape.tensors(), **optimizer_tensors(shape)} if trains else shape.tensors()
    senders = node.sources if phase is Phase.MOVE else _training_units(dag, name.model)
    holders: dict[RankRef, RankBoxes] = {}
    wanted: dict[RankRef, RankBoxes] = {}
    devices: dict[RankRef, DeviceId] = {}
    for slots, holdings in ((senders, holders), (node.targets, wanted)):
        for slot in slots:
            stage = _stage_of(dag, slot)
            boxes = unit_boxes(shape, stage.layout, convention_of(slot.model_stage.stage), tensors=tensors)
            ranks = [RankRef(str(slot), rank) for rank in range(stage.layout.ranks)]
            holdings |= zip(ranks, boxes, strict=True)
            devices |= zip(ranks, stage.unit_devices(slot.replica), strict=True)
    distance = device_distance(devices)
    dtype = STATE_DTYPE if trains else dag.new[_trained(name) if phase is Phase.SYNC else name].dtypes.compute
    program = compile_program(wanted, holders, wire_dtype=dtype, distance=distance)
    for (source, target), size in program.bytes_by_link().items():
        yield LinkTraffic(devices[source], devices[target], phase, size, distance(source, target))


def _trained(name: ModelStage) -> ModelStage:
    return ModelStage(name.model, Stage.TRAINING)


def _is_trained(dag: TransitionDag, name: ModelStage) -> bool:
    return _trained(name) in dag.new


def _training_units(dag: TransitionDag, model: str) -> Sequence[UnitSlot]:
    """Of the new plan: the sync comes after the move."""
    name = ModelStage(model, Stage.TRAINING)
    return [UnitSlot(name, Side.NEW, replica) for replica in range(dag.new[name].replicas)]


def _stage_of(dag: TransitionDag, slot: UnitSlot) -> StagePlan:
    return (dag.old if slot.side is Side.OLD else dag.new)[slot.model_stage]
