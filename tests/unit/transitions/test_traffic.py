"""Which link carries what: as much as the new units lack, from the nearest who has it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from nereus_common.core.ids import DeviceId
from nereus_common.core.plan import Plan
from nereus_common.state.architecture import ModelShape
from nereus_common.state.distance import FAR, SAME_DEVICE, SAME_NODE
from nereus_common.transitions.planner import plan_transition
from nereus_common.transitions.traffic import LinkTraffic, Phase, predicted_seconds, traffic
from tests.unit.transitions.jobs import ACTOR, REFERENCE, ROLLOUT, needs, plan, pool, stage

pytestmark = pytest.mark.fast
MODEL = ModelShape("llama", 2, 8, 16, 4, 2, 2, 64, tied=True)
SHAPES = {"actor": MODEL, "reference": MODEL}
PARAMETERS = sum(tensor.elements for tensor in MODEL.tensors().values())
STATE = 4 * (3 * PARAMETERS + len(MODEL.tensors()))
"""Parameters, two moments and a counter per tensor, in float32."""
D = pool(8)
"""Four to a node."""


def links_of(old: Plan, new: Plan) -> tuple[LinkTraffic, ...]:
    return traffic(plan_transition(old, new, needs, dict.fromkeys(D, 10_000)), SHAPES)


def received(links: tuple[LinkTraffic, ...]) -> dict[DeviceId, int]:
    found: dict[DeviceId, int] = defaultdict(int)
    for link in links:
        found[link.target] += link.bytes
    return found


def test_a_trained_model_that_moves_carries_its_state_and_is_taken_from_the_nearest_replica() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", (D[0], D[4]))})
    new = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs1", (D[1], D[5]))})
    assert links_of(old, new) == (
        LinkTraffic(D[0], D[1], Phase.MOVE, STATE, SAME_NODE),
        LinkTraffic(D[4], D[5], Phase.MOVE, STATE, SAME_NODE),
    )


def test_a_layout_that_changes_on_its_devices_moves_what_each_rank_lacks_from_the_old_processes() -> None:
    old = plan({ACTOR: stage(ACTOR, "tp1.pp1.fs2", D[:2])})
    new = plan({ACTOR: stage(ACTOR, "tp1.pp2.fs1", D[:2])})
    links = links_of(old, new)
    assert {link.phase for link in links} == {Phase.MOVE}
    assert {link.distance for link in links} == {SAME_DEVICE, SAME_NODE}
    # the head is tied to the embedding: both stages hold it
    assert sum(received(links).values()) == STATE + 4 * (3 * 64 * 8 + 1)


def test_generation_is_filled_by_its_trainer_and_a_frozen_model_by_its_own_units() -> None:
    trained, where = stage(ACTOR, "tp1.pp1.fs1", D[:1]), stage(REFERENCE, "tp1.pp1.fs1", D[1:2])
    old = plan({ACTOR: trained, ROLLOUT: stage(ROLLOUT, "tp1.pp1.fs1", D[2:3]), REFERENCE: where})
    new = plan(
        {
            ACTOR: trained,
            ROLLOUT: stage(ROLLOUT, "tp1.pp1.fs1", D[4:5]),
            REFERENCE: stage(REFERENCE, "tp1.pp1.fs1", D[3:4]),
        }
    )
    assert set(links_of(old, new)) == {
        LinkTraffic(D[0], D[4], Phase.SYNC, 2 * PARAMETERS, FAR),
        LinkTraffic(D[1], D[3], Phase.MOVE, 2 * PARAMETERS, SAME_NODE),
    }


def test_the_busiest_device_says_how_long_it_takes_and_an_unmeasured_link_makes_its_phase_unknown() -> None:
    links = [
        LinkTraffic(D[0], D[1], Phase.MOVE, 100, SAME_NODE),
        LinkTraffic(D[0], D[2], Phase.MOVE, 100, SAME_NODE),
        LinkTraffic(D[3], D[4], Phase.MOVE, 100, SAME_NODE),
        LinkTraffic(D[0], D[4], Phase.SYNC, 100, FAR),
    ]
    assert predicted_seconds(links, {SAME_NODE: 50.0}) == {Phase.MOVE: 4.0}
    assert predicted_seconds(links, {SAME_NODE: 50.0, FAR: 10.0}) == {Phase.MOVE: 4.0, Phase.SYNC: 10.0}
    assert predicted_seconds(links, {FAR: 10.0}) == {Phase.MOVE: 20.0, Phase.SYNC: 10.0}, "nearer is not slower"
    assert predicted_seconds(links, {}) == {}
