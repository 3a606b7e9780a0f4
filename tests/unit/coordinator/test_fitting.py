"""What the planner is told of real models: the demo's change of plan fits its devices."""

from __future__ import annotations

import pytest
from nereus_coordinator.fitting import rank_need

from nereus.cluster.config import ClusterConfig
from nereus.demo.job import demo_spec
from nereus.spec.moves import merge_target
from nereus_common.core.ids import DeviceId, ModelStage
from nereus_common.core.plan import StagePlan, plan_from_dict
from nereus_common.state.architecture import ModelShape
from nereus_common.transitions.dag import Mode
from nereus_common.transitions.needs import RankNeed
from nereus_common.transitions.planner import plan_transition

pytestmark = pytest.mark.fast
SMOLLM2 = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, tied=True)


def needs(name: ModelStage, stage: StagePlan, rank: int) -> RankNeed:
    return rank_need(SMOLLM2, name, stage, rank)


def test_the_demo_moves_beside_what_runs_on_the_devices_of_a_default_cluster() -> None:
    cluster = ClusterConfig()
    spec = demo_spec(cluster.device_ids, task="gcd", steps=16, seed=0, heldout=1)
    assert spec.plan is not None
    old, (move,) = plan_from_dict(spec.plan), spec.moves
    budgets = {DeviceId.parse(f"{cluster.node}/{slot}"): size for slot, size in cluster.devices.items()}
    dag = plan_transition(old, merge_target(old, move.plan), needs, budgets, layers={"actor": SMOLLM2.layers})
    assert [node.primitive for node in dag.nodes] == ["destroy", "split", "destroy"]
    assert {node.mode for node in dag.nodes} == {Mode.SHADOW}
