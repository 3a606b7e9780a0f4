from __future__ import annotations

import pytest

from nereus_common.core.errors import Unavailable
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.transport.base import Holder, PullItem, PullRequest
from nereus_common.transport.ledger import Ledger

pytestmark = pytest.mark.fast

FIRST, SECOND = (Holder(RankRef("unit", rank), f"address {rank}".encode()) for rank in range(2))


def item(name: str, *holders: Holder) -> PullItem:
    first, *rest = holders
    return PullItem(TensorName(name), Box((0, 0), (4, 4)), first.rank, first.address, alternatives=tuple(rest))


def request(*items: PullItem) -> PullRequest:
    return PullRequest(version=1, items=items, item_bytes=2, deadline=1.0, transition="t")


def test_items_of_one_holder_make_one_assignment() -> None:
    ledger = Ledger(request(item("a", FIRST), item("b", SECOND), item("c", FIRST)), chunk_bytes=16)
    assert [(made.holder, len(made.wants), made.spares) for made in ledger.start()] == [(FIRST, 2, 0), (SECOND, 1, 0)]


def test_only_what_is_missing_goes_to_the_next_holder() -> None:
    ledger = Ledger(request(item("a", FIRST, SECOND)), chunk_bytes=16)
    (made,) = ledger.start()
    ledger.verified(made, 0)
    (again,) = ledger.replace(made, Unavailable("gone"))
    assert again.holder == SECOND and again.spares == 0
    assert [want.piece.box for want in again.wants] == [Box((2, 0), (4, 4))]
    assert ledger.failed == [FIRST.rank]


def test_a_piece_without_another_holder_ends_the_pull_with_the_last_error() -> None:
    ledger = Ledger(request(item("a", FIRST, SECOND), item("b", FIRST)), chunk_bytes=16)
    (made,) = ledger.start()
    with pytest.raises(Unavailable, match="gone"):
        ledger.replace(made, Unavailable("gone"))


def test_a_failure_after_the_last_chunk_costs_nothing() -> None:
    ledger = Ledger(request(item("a", FIRST)), chunk_bytes=32)
    (made,) = ledger.start()
    ledger.verified(made, 0)
    assert ledger.replace(made, Unavailable("gone")) == [] and ledger.failed == []


def test_empty_boxes_are_asked_of_nobody() -> None:
    empty = PullItem(TensorName("a"), Box((0, 2), (4, 2)), FIRST.rank, FIRST.address)
    assert Ledger(request(empty), chunk_bytes=16).start() == []
