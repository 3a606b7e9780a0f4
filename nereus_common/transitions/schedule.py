"""When each node of a DAG runs, given how long each takes.

A device receives for one node at a time, because nodes that share its link only slow each other down. Nodes are placed
one by one, each as early as its links are free: first those with the longest chain behind them. Then, as long as that
makes the whole shorter, a node that waits for a link is placed before all others, with everything it depends on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from nereus_common.core.ids import DeviceId
from nereus_common.transitions.dag import Primitive, TransitionDag

SAME = 1e-9
"""Seconds within which two moments are one: sums of the same numbers differ in their last bits."""


class Span(NamedTuple):
    """Seconds from the start of the transition."""

    start: float
    end: float


Spans = tuple[Span, ...]
Neighbours = Sequence[Sequence[int]]
Links = Sequence[Iterable[Hashable]]


def list_schedule(edges: Iterable[tuple[int, int]], links: Links, seconds: Sequence[float]) -> Spans:
    """The span of every node, by number.

    `edges`: (before, after), each to a higher number. `links`: by node, the links that it keeps busy. `seconds`: how
    long each takes.
    """
    before: list[list[int]] = [[] for _ in seconds]
    for one, other in edges:
        before[other].append(one)
    tails = _tails(before, seconds)
    order = sorted(range(len(tails)), key=lambda number: (-tails[number], number))
    best = _placed(order, before, links, seconds)
    better = True
    while better:
        better = False
        for late in _waiting(best, before):
            trial = _ahead(order, late, before)
            found = _placed(trial, before, links, seconds)
            if makespan(found) < makespan(best) - SAME:
                order, best, better = trial, found, True
                break
    return best


def receivers(dag: TransitionDag) -> list[tuple[DeviceId, ...]]:
    """By node, the devices whose links it keeps busy: those that receive for it."""
    return [() if node.primitive is Primitive.DESTROY else tuple(node.acquires) for node in dag.nodes]


def makespan(spans: Sequence[Span]) -> float:
    return max((span.end for span in spans), default=0.0)


def _placed(order: Sequence[int], before: Neighbours, links: Links, seconds: Sequence[float]) -> Spans:
    """Each node at the first moment when what it depends on is done and its links are free for long enough."""
    spans: dict[int, Span] = {}
    taken: dict[Hashable, list[Span]] = {}
    for number in order:
        start = makespan([spans[other] for other in before[number]])
        busy = sorted({span for link in links[number] for span in taken.get(link, ())})
        for span in busy:
            if span.start < start + seconds[number] - SAME and span.end > start + SAME:
                start = span.end
        spans[number] = Span(start, start + seconds[number])
        for link in links[number]:
            taken.setdefault(link, []).append(spans[number])
    return tuple(spans[number] for number in range(len(order)))


def _waiting(spans: Spans, before: Neighbours) -> Iterator[int]:
    """Nodes that could have started earlier but for a link, the last ones first."""
    for number in sorted(range(len(spans)), key=lambda number: -spans[number].end):
        if spans[number].start > makespan([spans[other] for other in before[number]]) + SAME:
            yield number


def _ahead(order: Sequence[int], chosen: int, before: Neighbours) -> list[int]:
    """`order` with `chosen`, and all that it depends on, in front."""
    first, left = {chosen}, [chosen]
    while left:
        found = set(before[left.pop()]) - first
        first |= found
        left += found
    return [*(number for number in order if number in first), *(number for number in order if number not in first)]


def _tails(before: Neighbours, seconds: Sequence[float]) -> list[float]:
    """From the start of each node to the end of the longest chain behind it."""
    behind = [0.0] * len(seconds)
    for number in range(len(seconds) - 1, -1, -1):
        for other in before[number]:
            behind[other] = max(behind[other], behind[number] + seconds[number])
    return [one + own for one, own in zip(behind, seconds, strict=True)]
