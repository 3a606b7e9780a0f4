"""How the units of one model-stage become others: the paper's chain Split → Destroy → Extend → Merge (§6.1).

The chain goes through the largest layout of which both layouts are made. What runs is one direct move instead: every
unit is new processes that receive all of their state, so a link of the chain that makes intermediate units only adds
bytes, and the intermediate units, whose ranks hold at least as much as those on either side, only raise the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

from nereus_common.core.ids import DeviceId
from nereus_common.core.layout import Layout
from nereus_common.core.plan import StagePlan
from nereus_common.transitions.dag import Primitive

Devices = tuple[DeviceId, ...]
Held = Callable[[Layout, int], int]
"""(layout, rank) → bytes of state that the rank holds."""


def common_layout(one: Layout, other: Layout, layers: int | None = None) -> Layout:
    """The largest layout into which both can be split. `layers` of the model places the cuts of even pipelines; without
    it they are taken to divide evenly."""
    tp, fs = gcd(one.tp, other.tp), gcd(one.fs, other.fs)
    cuts = sorted(_cuts(one, layers) & _cuts(other, layers))
    split = None
    if layers is not None:
        bounds = [int(cut * layers) for cut in (Fraction(0), *cuts, Fraction(1))]
        sizes = tuple(stop - start for start, stop in pairwise(bounds))
        split = None if Layout(pp=len(sizes)).layer_counts(layers) == sizes else sizes
    elif one.split is not None and len(cuts) + 1 == one.pp:
        split = one.split
    elif other.split is not None and len(cuts) + 1 == other.pp:
        split = other.split
    return Layout(tp, len(cuts) + 1, fs, gcd(gcd(one.ep, other.ep), tp * fs), split)


def _cuts(layout: Layout, layers: int | None) -> frozenset[Fraction]:
    """Where the layers are cut, as fractions of all of them."""
    if layers is None and layout.split is None:
        return frozenset(Fraction(stage, layout.pp) for stage in range(1, layout.pp))
    counts = layout.layer_counts(layers if layers is not None else sum(layout.split or ()))
    return frozenset(Fraction(upto, sum(counts)) for upto in list(accumulate(counts))[:-1])


@lru_cache(1024)
def primitive_between(old: Layout, new: Layout, layers: int | None = None) -> Primitive:
    """What makes a unit of `new` from units of `old` in one move."""
    common = common_layout(old, new, layers)
    if _same(common, new):
        return Primitive.EXTEND if _same(common, old) else Primitive.SPLIT
    return Primitive.MERGE if _same(common, old) else Primitive.RESHARD


def _same(common: Layout, layout: Layout) -> bool:
    """Whether a layout of which `layout` is made is `layout` itself, however its pipeline split is written."""
    return (common.tp, common.pp, common.fs, common.ep) == (layout.tp, layout.pp, layout.fs, layout.ep)


@dataclass(frozen=True, slots=True)
class Link:
    """One primitive of a chain: `ended` and `made` are the devices of units, in rank order, `made` all of `layout`."""

    primitive: Primitive
    layout: Layout
    ended: tuple[Devices, ...] = ()
    made: tuple[Devices, ...] = ()


def local_chain(old: StagePlan, new: StagePlan, layers: int | None = None) -> tuple[Link, ...]:
    """The unfused chain. Links that would do nothing are left out."""
    common = common_layout(old.layout, new.layout, layers)
    links: list[Link] = []
    parts = olds = [old.unit_devices(replica) for replica in range(old.replicas)]
    if not _same(common, old.layout):
        parts = [part for unit in olds for part in _parts(unit, common.ranks)]
        links.append(Link(Primitive.SPLIT, common, tuple(olds), tuple(parts)))
    wanted = [part for replica in range(new.replicas) for part in _parts(new.unit_devices(replica), common.ranks)]
    staying, lacking = _matched(parts, wanted)
    ended = [part for part in parts if part not in staying]
    source = [] if staying else ended[:1]  # a sole copy is extended before it is destroyed
    early = tuple(part for part in ended if part not in source)
    if early:
        links.append(Link(Primitive.DESTROY, common, early))
    if lacking:
        links.append(Link(Primitive.EXTEND, common, (), tuple(lacking)))
    if source:
        links.append(Link(Primitive.DESTROY, common, tuple(source)))
    if not _same(common, new.layout):
        made = tuple(new.unit_devices(replica) for replica in range(new.replicas))
        links.append(Link(Primitive.MERGE, new.layout, tuple(wanted), made))
    return tuple(links)


def direct_chain(old: StagePlan, new: StagePlan, layers: int | None = None) -> tuple[Link, ...]:
    """The fused chain at its lowest peak: redundant units end, one link makes all new units, its last source ends."""
    olds = [old.unit_devices(replica) for replica in range(old.replicas)]
    news = [new.unit_devices(replica) for replica in range(new.replicas)]
    primitive = primitive_between(old.layout, new.layout, layers)
    staying, lacking = _matched(olds, news) if primitive is Primitive.EXTEND else (set[Devices](), news)
    ended = [unit for unit in olds if unit not in staying]
    crowd = {device for unit in lacking for device in unit}
    source = [] if staying or not lacking else sorted(ended, key=lambda unit: len(crowd.intersection(unit)))[:1]
    early = tuple(unit for unit in ended if unit not in source)
    links = [Link(Primitive.DESTROY, old.layout, early)] if early else []
    if lacking:
        links.append(Link(primitive, new.layout, tuple(source), tuple(lacking)))
    return tuple(links)


def chain_cost(old: StagePlan, chain: Sequence[Link], held: Held) -> tuple[int, dict[DeviceId, int]]:
    """(bytes received, peak of the state's bytes per device), each link building its units beside those it ends."""
    use: dict[DeviceId, int] = {}
    layouts: dict[Devices, Layout] = {}

    def add(unit: Devices, layout: Layout, sign: int) -> int:
        sizes = [held(layout, rank) for rank in range(layout.ranks)]
        for device, size in zip(unit, sizes, strict=True):
            use[device] = use.get(device, 0) + sign * size
        return sum(sizes)

    for replica in range(old.replicas):
        layouts[old.unit_devices(replica)] = old.layout
        add(old.unit_devices(replica), old.layout, 1)
    moved, peaks = 0, dict(use)
    for link in chain:
        moved += sum(add(unit, link.layout, 1) for unit in link.made)
        for device, size in use.items():
            peaks[device] = max(peaks.get(device, 0), size)
        for unit in link.ended:
            add(unit, layouts.pop(unit), -1)
        layouts |= dict.fromkeys(link.made, link.layout)
    return moved, peaks


def _parts(unit: Devices, ranks: int) -> list[Devices]:
    return [unit[start : start + ranks] for start in range(0, len(unit), ranks)]


def _matched(parts: Sequence[Devices], wanted: Sequence[Devices]) -> tuple[set[Devices], list[Devices]]:
    """(units that stay, units to be made) so that every wanted place has its unit."""
    have = set(parts)
    return {unit for unit in wanted if unit in have}, [unit for unit in wanted if unit not in have]
