"""Set algebra over boxes of one tensor: everything else in this folder is made of it.

A *region* is a sequence of boxes of the same rank. Functions that return a region return disjoint, non-empty boxes
in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product

from nereus_common.core.errors import InvalidInput
from nereus_common.core.transfer import Box

Region = tuple[Box, ...]


def elements(region: Iterable[Box]) -> int:
    """How many elements the boxes hold; an element in two boxes counts twice."""
    return sum(box.elements for box in region)


def subtract(box: Box, hole: Box) -> Region:
    """What is left of `box` without `hole`: at most two boxes per dimension."""
    common = box.intersect(hole)
    if common is None:
        return (box,) if box.elements else ()
    left: list[Box] = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        if start[axis] < common.start[axis]:
            left.append(Box(tuple(start), (*stop[:axis], common.start[axis], *stop[axis + 1 :])))
        if common.stop[axis] < stop[axis]:
            left.append(Box((*start[:axis], common.stop[axis], *start[axis + 1 :]), tuple(stop)))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
    return tuple(sorted(left))


def difference(region: Iterable[Box], holes: Iterable[Box]) -> Region:
    """The elements of `region` that are in none of `holes`, each once."""
    left = union(region)
    for hole in holes:
        left = tuple(piece for box in left for piece in subtract(box, hole))
    return coalesce(left)


def intersection(region: Iterable[Box], other: Sequence[Box]) -> Region:
    """The elements that are in both, each once."""
    common = (box.intersect(against) for box in region for against in other)
    return union(box for box in common if box is not None)


def union(region: Iterable[Box]) -> Region:
    """The same elements as disjoint boxes."""
    boxes = tuple(box for box in region if box.elements)
    if len(boxes) <= 1:
        return boxes
    done: list[Box] = []
    for box in boxes:
        fresh: Region = (box,)
        for known in done:
            fresh = tuple(piece for part in fresh for piece in subtract(part, known))
        done.extend(fresh)
    return coalesce(done)


def coalesce(region: Iterable[Box]) -> Region:
    """Join disjoint boxes that share a whole face, until none do."""
    boxes = sorted(box for box in region if box.elements)
    joined = len(boxes) > 1
    while joined:
        joined = False
        for axis in reversed(range(len(boxes[0].start))):
            before = len(boxes)
            boxes = _join_along(boxes, axis)
            joined |= len(boxes) < before
    return tuple(sorted(boxes))


def _join_along(boxes: Iterable[Box], axis: int) -> list[Box]:
    def others(box: Box) -> tuple[tuple[int, ...], ...]:
        return box.start[:axis], box.start[axis + 1 :], box.stop[:axis], box.stop[axis + 1 :]

    result: list[Box] = []
    for box in sorted(boxes, key=lambda box: (others(box), box.start[axis])):
        if result and others(result[-1]) == others(box) and result[-1].stop[axis] == box.start[axis]:
            result[-1] = Box(result[-1].start, box.stop)
        else:
            result.append(box)
    return result


def are_disjoint(region: Sequence[Box]) -> bool:
    return elements(union(region)) == elements(region)


def covers(region: Sequence[Box], whole: Box) -> bool:
    """Whether every element of `whole` is in some box."""
    return not difference((whole,), region)


def cells(box: Box, cutters: Iterable[Box]) -> Region:
    """Cut `box` along every face of `cutters`: no cell is partly inside any of them."""
    if not box.elements:
        return ()
    cuts = [{start, stop} for start, stop in zip(box.start, box.stop, strict=True)]
    for cutter in cutters:
        common = box.intersect(cutter)
        if common is not None:
            for axis, faces in enumerate(cuts):
                faces.update((common.start[axis], common.stop[axis]))
    spans = [list(pairwise(sorted(faces))) for faces in cuts]
    return tuple(Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in product(*spans))


def cut(box: Box, limit: int) -> Region:
    """Cut `box` along its leading dimensions into pieces of at most `limit` elements, as few as those cuts allow."""
    if limit < 1:
        raise InvalidInput(f"a piece of at most {limit} elements cannot exist", field="limit")
    if box.elements <= limit:
        return (box,) if box.elements else ()
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    per_index = box.elements // box.shape[axis]
    step = max(1, limit // per_index)
    pieces: list[Box] = []
    for first in range(box.start[axis], box.stop[axis], step):
        last = min(first + step, box.stop[axis])
        piece = Box((*box.start[:axis], first, *box.start[axis + 1 :]), (*box.stop[:axis], last, *box.stop[axis + 1 :]))
        pieces.extend(cut(piece, limit))
    return tuple(pieces)
