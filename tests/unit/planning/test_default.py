"""The default plan is a fixed rule of the devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.errors import InvalidPlan
from nereus_common.core.ids import DeviceId, Head, ModelStage
from nereus_common.core.plan import Plan
from nereus_common.planning.default import default_plan
from nereus_common.planning.memory import footprint
from nereus_common.state.architecture import ModelShape

pytestmark = pytest.mark.fast

GENERATION, TRAINING, REFERENCE = map(ModelStage.parse, ("actor/generation", "actor/training", "reference/inference"))

CRITIC, REWARD, CRITIC_TRAINING = map(ModelStage.parse, ("critic/inference", "reward/inference", "critic/training"))
PPO = (GENERATION, TRAINING, CRITIC_TRAINING, CRITIC, REFERENCE, REWARD)
SMOLLM2 = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, tied=True)


def devices(count: int) -> list[DeviceId]:
    return [DeviceId("node0", f"cpu{slot}") for slot in range(count)]


def test_four_devices_make_two_generation_replicas_and_two_training_ranks() -> None:
    plan = default_plan(devices(4), (GENERATION, TRAINING))
    assert str(plan[GENERATION]) == "tp1.pp1.fs1 x2"
    assert str(plan[TRAINING]) == "tp1.pp1.fs2"
    assert plan.colocated == ()


def test_one_device_is_shared_in_the_order_of_the_phases() -> None:
    assert default_plan(devices(1), (TRAINING, GENERATION, REFERENCE)).colocated == ((GENERATION, REFERENCE, TRAINING),)


@given(st.integers(1, 40), st.booleans())
def test_every_device_is_used(count: int, with_reference: bool) -> None:
    stages = (GENERATION, TRAINING, REFERENCE) if with_reference else (GENERATION, TRAINING)
    assert set(default_plan(devices(count), stages).devices) == set(devices(count))


def ppo_bytes(plan: Plan) -> dict[DeviceId, int]:
    """Bytes granted on each device when all models are SmolLM2-135M."""
    used: dict[DeviceId, int] = defaultdict(int)
    for name, stage in plan.stages:
        head = Head.LM if name.model in ("actor", "reference") else Head.SCORE
        shape = replace(SMOLLM2, head=head, tied=head is Head.LM)
        for replica, rank in product(range(stage.replicas), range(stage.layout.ranks)):
            used[stage.unit_devices(replica)[rank]] += footprint(shape, name, stage, rank).total
    return used


def test_four_devices_of_six_gibibytes_hold_all_of_ppo_at_135_million_parameters() -> None:
    plan = default_plan(devices(4), PPO)
    used = ppo_bytes(plan)
    assert set(plan.names) == set(PPO) and set(used) == set(devices(4))
    assert max(used.values()) <= 6 << 30, {str(device): size / 2**30 for device, size in used.items()}
    assert plan.colocated == ((CRITIC, REFERENCE, REWARD),)


def test_four_devices_of_six_gibibytes_hold_grpo_with_a_reference() -> None:
    plan = default_plan(devices(4), (GENERATION, TRAINING, REFERENCE))
    assert max(ppo_bytes(plan).values()) <= 6 << 30
    assert str(plan[TRAINING]) == "tp1.pp1.fs2" and str(plan[REFERENCE]) == "tp1.pp1.fs1 x2"


def test_on_one_device_all_of_ppo_takes_turns() -> None:
    plan = default_plan(devices(1), PPO)
    assert plan.colocated == ((GENERATION, CRITIC, REFERENCE, REWARD, TRAINING, CRITIC_TRAINING),)


@pytest.mark.parametrize(
    ("count", "generating", "actor", "critic", "scoring"),
    [(2, 1, 1, 1, 1), (3, 1, 1, 1, 1), (4, 1, 1, 1, 1), (6, 3, 1, 1, 1), (8, 4, 2, 1, 1), (12, 6, 2, 2, 2)],
)
def test_the_models_of_ppo_learn_on_devices_of_their_own_as_far_as_there_are_enough(
    count: int, generating: int, actor: int, critic: int, scoring: int
) -> None:
    plan = default_plan(devices(count), PPO)
    assert plan[GENERATION].replicas == generating
    assert (plan[TRAINING].layout.fs, plan[CRITIC_TRAINING].layout.fs) == (actor, critic)
    assert {plan[name].devices for name in (CRITIC, REFERENCE, REWARD)} == {plan[REWARD].devices}
    assert plan[REWARD].replicas == scoring
    assert not set(plan[GENERATION].devices) & {d for n in PPO if n != GENERATION for d in plan[n].devices}
    assert set(plan.devices) == set(devices(count))


def test_model_stages_that_share_devices_take_smaller_microbatches() -> None:
    plan = default_plan(devices(4), PPO)
    assert plan[TRAINING].microbatch_tokens == 2 * plan[REFERENCE].microbatch_tokens


def test_values_need_no_memory_for_logits() -> None:
    stage = default_plan(devices(1), (CRITIC,))[CRITIC]
    language, score = (footprint(replace(SMOLLM2, head=head, tied=head is Head.LM), CRITIC, stage, 0) for head in Head)
    logits = stage.microbatch_tokens * SMOLLM2.vocabulary * 4
    assert logits * 0.98 < language.activations - score.activations < logits
    assert score.weights == language.weights + 2 * SMOLLM2.hidden


def test_no_device_is_no_plan() -> None:
    with pytest.raises(InvalidPlan, match="no device"):
        default_plan([], (GENERATION, TRAINING))
