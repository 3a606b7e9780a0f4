"""The layout oracle: (model, layout, rank, convention) → the boxes that rank holds of every logical tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nereus_common.core.ids import TensorName
from nereus_common.core.layout import Coordinate, Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import Home, LogicalTensor, ModelShape, Rule
from nereus_common.state.boxes import Region, difference, union
from nereus_common.state.conventions import Convention, chunk

RankBoxes = Mapping[TensorName, Region]
"""What one rank holds: disjoint boxes per tensor; `()` where its stage has the tensor and its share is empty."""

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW_COUNTERS = ("step",)


def shard_boxes(
    model: ModelShape,
    layout: Layout,
    rank: int,
    convention: Convention,
    *,
    tensors: Mapping[TensorName, LogicalTensor] | None = None,
) -> dict[TensorName, Region]:
    """The boxes of `rank`, in model order, for the parameters or for the given `tensors` (an optimizer's).

    Tensors of other pipeline stages are absent. Raises what `Convention.check` raises.
    """
    convention.check(model, layout)
    place = layout.coordinate(rank)
    layers = layers_of(model, layout, place.pp, convention)
    return {
        name: _share(tensor, layout, place, convention)
        for name, tensor in (model.tensors() if tensors is None else tensors).items()
        if _is_home(tensor, layout, place.pp, layers)
    }


def _is_home(tensor: LogicalTensor, layout: Layout, stage: int, layers: range) -> bool:
    if tensor.home is Home.LAYER:
        return tensor.layer in layers
    first, last = stage == 0, stage == layout.pp - 1
    return (first and tensor.home is not Home.LAST) or (last and tensor.home is not Home.FIRST)


def _share(tensor: LogicalTensor, layout: Layout, place: Coordinate, convention: Convention) -> Region:
    box = convention.cut(tensor, layout.tp, place.tp)
    if tensor.shape:  # a 0-d tensor cannot be cut: every rank of the stage has it
        box = chunk(box, 0, layout.fs, place.fs)
    return (box,) if box.elements else ()


def unit_boxes(
    model: ModelShape,
    layout: Layout,
    convention: Convention,
    *,
    tensors: Mapping[TensorName, LogicalTensor] | None = None,
) -> tuple[dict[TensorName, Region], ...]:
    """`shard_boxes` of every rank of a unit, in rank order."""
    return tuple(shard_boxes(model, layout, rank, convention, tensors=tensors) for rank in range(layout.ranks))


def owned_boxes(ranks: Sequence[RankBoxes]) -> tuple[dict[TensorName, Region], ...]:
    """Of what the ranks hold, the part for which each is the first holder: disjoint, and together everything.

    The digest of a unit is the sum over these.
    """
    seen: dict[TensorName, Region] = {}
    owned: list[dict[TensorName, Region]] = []
    for rank in ranks:
        owned.append({name: difference(region, seen.get(name, ())) for name, region in rank.items()})
        for name, region in rank.items():
            seen[name] = union((*seen.get(name, ()), *region))
    return tuple(owned)


def layers_of(model: ModelShape, layout: Layout, stage: int, convention: Convention) -> range:
    """The layers of pipeline stage `stage`; over all stages every layer appears exactly once."""
    counts = convention.layer_counts(layout, model.layers)
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))


def slot_name(parameter: TensorName, slot: str) -> TensorName:
    """The name of an optimizer tensor: `model.norm.weight:exp_avg`."""
    return TensorName(f"{parameter}:{slot}")


def optimizer_tensors(
    model: ModelShape, moments: Sequence[str] = ADAMW_MOMENTS, counters: Sequence[str] = ADAMW_COUNTERS
) -> Mapping[TensorName, LogicalTensor]:
    """The optimizer's tensors of every parameter: moments shaped and cut as it is, counters 0-d and replicated."""
    found: dict[TensorName, LogicalTensor] = {}
    for name, parameter in model.tensors().items():
        for slot in moments:
            found[slot_name(name, slot)] = _slot(parameter, slot, parameter.shape, parameter.rule, parameter.units)
        for slot in counters:
            found[slot_name(name, slot)] = _slot(parameter, slot, (), Rule.REPLICATED, 1)
    return MappingProxyType(found)


def _slot(parameter: LogicalTensor, slot: str, shape: tuple[int, ...], rule: Rule, units: int) -> LogicalTensor:
    return LogicalTensor(slot_name(parameter.name, slot), shape, rule, parameter.home, units, parameter.layer)


def whole_boxes(tensors: Mapping[TensorName, LogicalTensor]) -> dict[TensorName, Region]:
    """Everything of every tensor: what a checkpoint holds."""
    return {name: (Box.whole(tensor.shape),) for name, tensor in tensors.items()}
