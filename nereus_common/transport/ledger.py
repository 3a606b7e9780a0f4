"""Who is to send what, and what is still missing: the pure part of a pull.

Items are grouped by holder into assignments. When an assignment fails, its missing pieces are assigned to the next
holder that has them; when a piece has no holder left, the last error stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from nereus_common.core.errors import NereusError
from nereus_common.core.transfer import RankRef
from nereus_common.transport.base import Holder, PullRequest
from nereus_common.transport.chunking import Chunk, Piece, plan_chunks


@dataclass(frozen=True, slots=True)
class Want:
    """A piece and whom to ask for it, in order."""

    piece: Piece
    holders: tuple[Holder, ...]


@dataclass(eq=False, slots=True)
class Assignment:
    """What one holder is asked for. `spares`: how many holders are left for its least covered piece."""

    holder: Holder
    wants: tuple[Want, ...]
    chunks: list[Chunk]
    spares: int
    missing: set[int] = field(default_factory=set)


class Ledger:
    """Tracks one pull. Every chunk of every assignment is either missing or was verified and delivered."""

    def __init__(self, request: PullRequest, chunk_bytes: int) -> None:
        self._request = request
        self._chunk_bytes = chunk_bytes
        self.failed: list[RankRef] = []

    def start(self) -> list[Assignment]:
        """The first assignments: every item at its source."""
        items = self._request.items
        return self._assign(Want(Piece(item.tensor, item.box, item.shape), item.holders) for item in items)

    def verified(self, assignment: Assignment, chunk: int) -> None:
        assignment.missing.remove(chunk)

    def replace(self, assignment: Assignment, error: NereusError) -> list[Assignment]:
        """Assign what `assignment` did not deliver to the next holders; raise `error` when a piece has none."""
        if not assignment.missing:
            return []
        if assignment.spares == 0:
            raise error
        self.failed.append(assignment.holder.rank)
        missing = [piece for chunk in sorted(assignment.missing) for piece in assignment.chunks[chunk].pieces]
        return self._assign(Want(piece, _holders(assignment, piece)[1:]) for piece in missing)

    def _assign(self, wants: Iterable[Want]) -> list[Assignment]:
        by_holder: dict[Holder, list[Want]] = defaultdict(list)
        for want in wants:
            by_holder[want.holders[0]].append(want)
        made = [self._assignment(holder, tuple(group)) for holder, group in by_holder.items()]
        return [assignment for assignment in made if assignment.chunks]

    def _assignment(self, holder: Holder, wants: tuple[Want, ...]) -> Assignment:
        chunks = plan_chunks([want.piece for want in wants], self._request.item_bytes, self._chunk_bytes)
        spares = min(len(want.holders) for want in wants) - 1
        return Assignment(holder, wants, chunks, spares, set(range(len(chunks))))


def _holders(assignment: Assignment, piece: Piece) -> tuple[Holder, ...]:
    """The holders of the item that `piece` was cut from."""
    return next(
        want.holders
        for want in assignment.wants
        if want.piece.tensor == piece.tensor and want.piece.box.contains(piece.box)
    )
