"""The length of a step from the lengths of its tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_common.core.ids import DeviceId
from nereus_common.core.workflow import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    rl_workflow,
)
from nereus_common.planning.step_time import Places, place_of, step_time

pytestmark = pytest.mark.fast

PPO = rl_workflow(critic=True, reference=True)
SECONDS = {
    "rollouts": 10.0,
    "reward functions": 1.0,
    "reference": 2.0,
    "critic values": 3.0,
    "update critic": 5.0,
    "update actor": 7.0,
}
STAGES = (ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_INFERENCE, CRITIC_TRAINING, REFERENCE_INFERENCE)
APART: Places = {stage: frozenset({str(stage)}) for stage in STAGES}
TOGETHER: Places = {stage: frozenset({"node0"}) for stage in STAGES}


def test_independent_tasks_run_side_by_side_where_their_places_differ() -> None:
    assert step_time(PPO, SECONDS, APART, sync=4.0).total == 10 + max(1, 2, 3) + max(5, 7) + 4


def test_tasks_that_share_a_place_run_one_after_the_other() -> None:
    assert step_time(PPO, SECONDS, TOGETHER).total == 10 + max(1, 2 + 3) + 5 + 7
    pair = {**APART, CRITIC_TRAINING: APART[ACTOR_TRAINING]}
    assert step_time(PPO, SECONDS, pair).total == 10 + 3 + 12


def test_asynchronous_sampling_hides_behind_the_rest_or_the_rest_behind_it() -> None:
    assert step_time(PPO, SECONDS, APART, asynchronous=True).total == 10
    assert step_time(PPO, {**SECONDS, "rollouts": 4.0}, APART, sync=1.0, asynchronous=True).total == 3 + 7 + 1


def test_nothing_hides_where_all_compute_on_the_same_place() -> None:
    """Whatever is overlapped, a place has all of its work to do for each version."""
    assert step_time(PPO, SECONDS, TOGETHER, asynchronous=True).total == 10 + 2 + 3 + 5 + 7


times = st.dictionaries(st.sampled_from(sorted(SECONDS)), st.floats(0, 100))
places = st.fixed_dictionaries(
    {stage: st.frozensets(st.sampled_from("abc"), min_size=1, max_size=2) for stage in STAGES}
)


@given(times, places)
def test_a_step_is_no_shorter_than_its_chain_and_its_busiest_place_and_no_longer_than_all_of_it(
    seconds: dict[str, float], where: dict[object, frozenset[str]]
) -> None:
    found = step_time(PPO, seconds, where)  # type: ignore[arg-type]
    chain = sum(max((seconds.get(task.name, 0.0) for task in wave), default=0.0) for wave in PPO.waves())
    everything = sum(seconds.values())
    assert chain - 1e-6 <= found.total <= everything + 1e-6
    for place in "abc":
        on = sum(seconds.get(task.name, 0.0) for task in PPO.tasks if task.stage and place in where[task.stage])
        assert found.total >= on - 1e-6
    spans = {span.task: span for span in found.spans}
    for task in PPO.tasks:
        for other in PPO.needs(task):
            assert spans[other.name].end <= spans[task.name].start + 1e-9


@given(times, places)
def test_overlapping_never_makes_a_step_longer(seconds: dict[str, float], where: dict[object, frozenset[str]]) -> None:
    overlapped = step_time(PPO, seconds, where, asynchronous=True)  # type: ignore[arg-type]
    assert overlapped.total <= step_time(PPO, seconds, where).total + 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("node0/cpu0", "node0/cpu1", True),
        ("node0/cpu0", "node1/cpu0", False),
        ("node0/gpu0", "node0/gpu1", False),
        ("node0/gpu0", "node0/gpu0", True),
        ("node0/gpu0", "node0/cpu0", False),
    ],
)
def test_cpu_devices_of_a_node_share_its_cores_and_other_devices_stand_alone(
    first: str, second: str, same: bool
) -> None:
    assert (place_of(DeviceId.parse(first)) == place_of(DeviceId.parse(second))) is same
