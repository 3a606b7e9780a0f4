"""The layout oracle: (model, layout, rank, convention) → the boxes that rank holds of every logical tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from nereus_common.core.ids import TensorName
from nereus_common.core.layout import Coordinate, Layout
from nereus_common.core.transfer import Box
from nereus_common.state.architecture import Home, LogicalTensor, ModelShape, Rule
from nereus_common.state.boxes import Region, difference, union
from nereus_common.state.conventions import Convention, chunk
from nereus_common.state.experts import Share, dense_share, expert_share

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

    Tensors of other pipeline stages, and experts of other ranks, are absent. Raises what `Convention.check` raises.
    """
    convention.check(model, layout)
    return _shard(
        model, layout, layout.coordinate(rank), convention, model.tensors() if tensors is None else tensors, {}
    )


def unit_boxes(
    model: ModelShape,
    layout: Layout,
    convention: Convention,
    *,
    tensors: Mapping[TensorName, LogicalTensor] | None = None,
) -> tuple[dict[TensorName, Region], ...]:
    """`shard_boxes` of every rank of a unit, in rank order; equal regions are one object."""
    convention.check(model, layout)
    wanted = model.tensors() if tensors is None else tensors
    known: dict[_Cut, Region] = {}
    return tuple(
        _shard(model, layout, layout.coordinate(rank), convention, wanted, known) for rank in range(layout.ranks)
    )


_Cut = tuple[Rule, tuple[int, ...], int, tuple[int, int], tuple[int, int]]
"""All that a region follows from: rule, shape and units of its tensor, its rank's (part, parts) over tp and over fs."""


def _shard(
    model: ModelShape,
    layout: Layout,
    place: Coordinate,
    convention: Convention,
    tensors: Mapping[TensorName, LogicalTensor],
    known: dict[_Cut, Region],
) -> dict[TensorName, Region]:
    layers = layers_of(model, layout, place.pp, convention)
    dense, (index, shared) = dense_share(layout, place), expert_share(layout, place)
    experts = range(0) if model.experts is None else convention.experts(model.experts.count, layout.ep, index)
    boxes: dict[TensorName, Region] = {}
    for name, tensor in tensors.items():
        if not _is_home(tensor, layout, place.pp, layers):
            continue
        if tensor.expert is not None and tensor.expert not in experts:
            continue
        share = dense if tensor.expert is None else shared
        key = (tensor.rule, tensor.shape, tensor.units, share.tp, share.fs)
        if key not in known:
            known[key] = _region(tensor, share, convention)
        boxes[name] = known[key]
    return boxes


def _is_home(tensor: LogicalTensor, layout: Layout, stage: int, layers: range) -> bool:
    if tensor.home is Home.LAYER:
        return tensor.layer in layers
    first, last = stage == 0, stage == layout.pp - 1
    return (first and tensor.home is not Home.LAST) or (last and tensor.home is not Home.FIRST)


def _region(tensor: LogicalTensor, share: Share, convention: Convention) -> Region:
    (part, parts), (shard, shards) = share.tp, share.fs
    box = convention.cut(tensor, parts, part)
    if tensor.shape:  # a 0-d tensor cannot be cut: every rank of the stage has it
        box = chunk(box, 0, shards, shard)
    return (box,) if box.elements else ()


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
    return replace(parameter, name=slot_name(parameter.name, slot), shape=shape, rule=rule, units=units)


def whole_boxes(tensors: Mapping[TensorName, LogicalTensor]) -> dict[TensorName, Region]:
    """Everything of every tensor: what a checkpoint holds."""
    return {name: (Box.whole(tensor.shape),) for name, tensor in tensors.items()}
