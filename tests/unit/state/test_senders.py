from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import NotFound
from nereus_common.core.ids import DeviceId, TensorName
from nereus_common.core.transfer import Box, RankRef
from nereus_common.state.distance import device_distance, distances
from nereus_common.state.pieces import RankSets
from nereus_common.state.program import compile_program
from nereus_common.state.senders import balanced

pytestmark = pytest.mark.fast

ITEMS = st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(1, 5)), max_size=40)


@given(ITEMS)
def test_items_dealt_out_in_groups_go_where_one_by_one_they_would(items: list[tuple[set[int], int]]) -> None:
    sets = RankSets()
    numbers = [sets.number(np.array(sorted(able))) for able, _ in items]
    if not items:
        return
    found = balanced(np.array(numbers), np.array([size for _, size in items]), sets, 5).tolist()
    load = [0] * 5
    order = sorted(range(len(items)), key=lambda at: (len(items[at][0]), -items[at][1], numbers[at], at))
    for at in order:
        able, size = items[at]
        assert found[at] == min(able, key=lambda rank: (load[rank], rank))
        load[found[at]] += size


W = TensorName("w")
ALL = Box.whole((6, 4))
T = RankRef("t", 0)
PLACES = {
    T: DeviceId("n1", "gpu0"),
    RankRef("device", 0): DeviceId("n1", "gpu0"),
    RankRef("node", 0): DeviceId("n1", "gpu1"),
    RankRef("switch", 0): DeviceId("n2", "gpu0"),
    RankRef("far", 0): DeviceId("n3", "gpu0"),
}
SWITCHES = {"n1": "leaf0", "n2": "leaf0", "n3": "leaf1"}


def test_same_device_is_nearer_than_same_node_than_same_switch_than_anything_else() -> None:
    apart = device_distance(PLACES, SWITCHES)
    names = ("device", "node", "switch", "far")
    assert [apart(RankRef(name, 0), T) for name in names] == [0, 1, 2, 3]
    for last in range(1, 5):
        sources = {RankRef(name, 0): {W: (ALL,)} for name in names[4 - last :]}
        program = compile_program({T: {W: (ALL,)}}, sources, wire_dtype="float32", distance=apart)
        assert {transfer.source.unit for transfer in program.transfers} == {names[4 - last]}


def test_a_node_whose_switch_is_unknown_shares_it_with_no_other() -> None:
    apart = device_distance(PLACES, {"n1": "leaf0"})
    assert apart(RankRef("switch", 0), T) == apart(RankRef("far", 0), T) == 3
    assert apart(RankRef("node", 0), T) == 1
    assert device_distance(PLACES)(RankRef("switch", 0), T) == 3


def test_a_rank_without_a_device_is_named() -> None:
    with pytest.raises(NotFound, match="lost#7 has no device"):
        device_distance(PLACES)(RankRef("lost", 7), T)


def test_the_table_of_distances_is_that_of_the_pairs() -> None:
    ranks = list(PLACES)
    apart = device_distance(PLACES, SWITCHES)
    expected = distances(lambda source, target: apart(source, target), ranks, ranks[:2])
    assert (apart.table(ranks, ranks[:2]) == expected).all()


def test_replicas_far_from_everybody_send_equal_shares() -> None:
    """Sixteen layers from four holders to eight targets: every link's end carries the same."""
    tensors = [TensorName(f"model.layers.{layer}.w") for layer in range(16)]
    sources = {RankRef(f"s{one}", 0): dict.fromkeys(tensors, (ALL,)) for one in range(4)}
    targets = {RankRef(f"t{one}", 0): dict.fromkeys(tensors, (ALL,)) for one in range(8)}
    program = compile_program(targets, sources, wire_dtype="float32")
    sent: dict[RankRef, int] = dict.fromkeys(sources, 0)
    for (source, _), size in program.bytes_by_link().items():
        sent[source] += size
    assert set(sent.values()) == {8 * 16 * ALL.elements * 4 // 4}
    first = [program.for_target(target)[0].source for target in targets]
    assert all(first.count(source) == 2 for source in sources), "targets that begin together ask different senders"
