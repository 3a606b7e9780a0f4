"""Which experts a rank holds, and how the ranks that share an expert cut its matrices.

ep adds no ranks: it divides the fs × tp ranks of a pipeline stage. They are numbered as always, tp running fastest, and
read as a grid (shards, ep, parts), the last running fastest, where `parts` = gcd(fs · tp / ep, tp):

- the expert-parallel index says which of the layer's experts a rank holds, each a contiguous run of them;
- over `parts`, an expert is cut as a dense layer is over tp; over `shards`, its rows as any tensor's over fs.

So neighbours hold different experts, as the exchange of tokens in every layer wants it, and with ep 1 the grid is
(fs, tp): an expert is cut as if it were dense. With ep = fs each fs index has its own experts, cut over tp; with
ep = fs · tp each rank has whole experts. Attention, norms, router and shared experts take no notice of ep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nereus_common.core.layout import Coordinate, Layout


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's place among those that cut a tensor: (index, how many) over tp, then over fs."""

    tp: tuple[int, int]
    fs: tuple[int, int]


def dense_share(layout: Layout, place: Coordinate) -> Share:
    """For every tensor but an expert's."""
    return Share((place.tp, layout.tp), (place.fs, layout.fs))


def expert_degrees(layout: Layout) -> tuple[int, int]:
    """(parts, shards): over how many ranks an expert is cut like a dense layer over tp, and over how many like fs."""
    together = layout.fs * layout.tp // layout.ep
    parts = math.gcd(together, layout.tp)
    return parts, together // parts


def expert_share(layout: Layout, place: Coordinate) -> tuple[int, Share]:
    """The expert-parallel index of a rank, and its place among the ranks that share those experts."""
    parts, shards = expert_degrees(layout)
    rest, part = divmod(place.fs * layout.tp + place.tp, parts)
    shard, index = divmod(rest, layout.ep)
    return index, Share((part, parts), (shard, shards))


def chunked_experts(experts: int, ep: int, index: int) -> range:
    """As torch.chunk: ⌈experts / ep⌉ each, later ranks fewer or none."""
    size = -(-experts // ep)
    return range(min(experts, index * size), min(experts, (index + 1) * size))


def even_experts(experts: int, ep: int, index: int) -> range:
    """As vLLM's linear placement: what does not divide goes to the first ranks, one each."""
    size, left = divmod(experts, ep)
    first = index * size + min(index, left)
    return range(first, first + size + (index < left))
