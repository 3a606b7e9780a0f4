"""When each node of a DAG runs, given how long each takes: list scheduling, the longest remaining chain first.

A device receives for one node at a time, because nodes that share its link only slow each other down.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nereus_common.core.ids import DeviceId
from nereus_common.transitions.dag import Primitive, TransitionDag


class Span(NamedTuple):
    """Seconds from the start of the transition."""

    start: float
    end: float


def list_schedule(dag: TransitionDag, seconds: Sequence[float]) -> tuple[Span, ...]:
    """The span of every node, by id. `seconds`: how long each takes."""
    after: Mapping[int, list[int]] = defaultdict(list)
    waiting = [0] * len(dag.nodes)
    for edge in dag.edges:
        after[edge.before].append(edge.after)
        waiting[edge.after] += 1
    tail = _tails(after, seconds)
    spans: dict[int, Span] = {}
    ready = [(-tail[node.id], node.id) for node in dag.nodes if not waiting[node.id]]
    running: list[tuple[float, int]] = []
    busy: set[DeviceId] = set()
    now = 0.0
    while ready or running:
        ready = _start(dag, ready, busy, running, spans, seconds, now)
        now, done = heapq.heappop(running)
        busy.difference_update(_links(dag, done))
        for following in after[done]:
            waiting[following] -= 1
            if not waiting[following]:
                ready.append((-tail[following], following))
    return tuple(spans[node.id] for node in dag.nodes)


def makespan(spans: Sequence[Span]) -> float:
    return max((span.end for span in spans), default=0.0)


def _start(
    dag: TransitionDag,
    ready: list[tuple[float, int]],
    busy: set[DeviceId],
    running: list[tuple[float, int]],
    spans: dict[int, Span],
    seconds: Sequence[float],
    now: float,
) -> list[tuple[float, int]]:
    """Start what can start now; what is ready and has to wait for a link."""
    left = []
    for entry in sorted(ready):
        number = entry[1]
        links = _links(dag, number)
        if busy.isdisjoint(links):
            busy.update(links)
            spans[number] = Span(now, now + seconds[number])
            heapq.heappush(running, (now + seconds[number], number))
        else:
            left.append(entry)
    return left


def _links(dag: TransitionDag, number: int) -> Sequence[DeviceId]:
    """The devices that receive for a node."""
    node = dag.nodes[number]
    return () if node.primitive is Primitive.DESTROY else tuple(node.acquires)


def _tails(after: Mapping[int, list[int]], seconds: Sequence[float]) -> list[float]:
    """From the start of each node to the end of the longest chain behind it."""
    tail = list(seconds)
    for number in range(len(seconds) - 1, -1, -1):
        tail[number] += max((tail[following] for following in after[number]), default=0.0)
    return tail
