"""The pure parts of the benchmarks: what they measure, and that a peer is given the same work."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.async_vs_sync import max_staleness
from benchmarks.pace import Pace, step_ends
from benchmarks.peers.config import TrlConfig, grpo_arguments, trl_config
from benchmarks.profile_rank import operators
from benchmarks.profile_step import limits
from benchmarks.rl_vs_trl import PEERS
from benchmarks.step import SPEC
from nereus.events import JobEvent
from nereus.spec import JobSpec
from nereus_common.core.errors import InvalidInput

pytestmark = pytest.mark.fast

JOB = JobSpec.from_dict(SPEC)


def event(kind: str, second: int, **payload: Any) -> JobEvent:
    time = datetime.datetime.fromtimestamp(second, datetime.UTC)
    return JobEvent(str(second), time, kind, payload)


def step(number: int, second: int, **more: Any) -> JobEvent:
    return event("step", second, step=number, reward_mean=0.0, tokens=1, seconds={}, **more)


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own() -> None:
    pace = Pace.between([100.0, 110.0, 130.0, 140.0], warm_up=2)
    assert pace.seconds == (20.0, 10.0)
    assert pace.steps_per_hour == 240.0
    assert pace.spread == [180.0, 360.0]


@pytest.mark.parametrize("warm_up", [0, 3, 4])
def test_nothing_is_measured_without_warm_up_or_without_steps_after_it(warm_up: int) -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        Pace.between([1.0, 2.0, 3.0], warm_up)


def test_only_steps_mark_ends() -> None:
    assert step_ends([event("state", 1, state="running"), step(0, 5), event("log", 6, message=""), step(1, 9)]) == [
        5,
        9,
    ]


def test_the_greatest_staleness_is_that_of_any_step_and_a_silent_step_is_an_error() -> None:
    assert max_staleness([step(0, 1, staleness_max=0), step(1, 2, staleness_max=1), step(2, 3, staleness_max=0)]) == 1
    with pytest.raises(KeyError):
        max_staleness([step(0, 1)])


@pytest.mark.parametrize("name", sorted(PEERS.values()))
def test_a_peer_does_the_work_of_our_job(name: str) -> None:
    arguments = grpo_arguments(JOB, trl_config(name))
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 16 * 8
    assert (arguments["num_generations"], arguments["max_steps"]) == (8, JOB.steps)
    assert arguments["max_completion_length"] == JOB.sampling.max_tokens
    assert arguments["learning_rate"] == JOB.optimizer.learning_rate
    assert (arguments["loss_type"], arguments["scale_rewards"]) == ("dapo", "group")
    assert arguments["use_cpu"]


def test_a_warm_up_before_a_constant_rate_is_kept() -> None:
    warm = JobSpec.from_dict({**SPEC, "optimizer": {"warmup_steps": 2}})
    assert grpo_arguments(warm, TrlConfig(microbatch=8))["lr_scheduler_type"] == "constant_with_warmup"
    assert grpo_arguments(JOB, TrlConfig(microbatch=8))["lr_scheduler_type"] == "constant"


@pytest.mark.parametrize(
    ("spec", "peer", "says"),
    [
        ({}, TrlConfig(microbatch=8, arguments={"learning_rate": 1.0}), "the job decides learning_rate"),
        ({}, TrlConfig(microbatch=48), "no multiple of 48"),
        ({"algorithm": {"name": "rloo"}}, TrlConfig(microbatch=8), "for GRPO"),
        ({"algorithm": {"minibatches": 2}}, TrlConfig(microbatch=8), "one update a step"),
    ],
)
def test_what_would_make_the_sides_unequal_is_refused(spec: dict[str, Any], peer: TrlConfig, says: str) -> None:
    plan = {"plan": None} if "algorithm" in spec else {}
    with pytest.raises(InvalidInput, match=says):
        grpo_arguments(JobSpec.from_dict({**SPEC, **spec, **plan}), peer)


@dataclass
class Average:
    key: str
    self_cpu_time_total: float
    count: int = 1


def test_operators_come_by_their_own_time_and_share_in_all_of_it() -> None:
    found = operators([Average("add", 1e6), Average("mm", 6e6, 9), Average("copy", 1e6)], top=2)
    assert [(one["name"], one["self_seconds"], one["share"], one["calls"]) for one in found] == [
        ("mm", 6.0, 0.75, 9),
        ("add", 1.0, 0.125, 1),
    ]


def test_what_limits_a_step_is_its_longest_phase_and_the_longest_part_of_its_update() -> None:
    said = limits(
        {"generation": 1.0, "training": 3.0, "total": 4.0},
        {"pack": 1.0, "forward_backward": 2.0},
        [{"name": "mm", "share": 0.5}],
    )
    assert said[0] == "step: training takes 75% of 4.00 s"
    assert said[1].startswith("update: forward_backward takes 67%")
    assert "mm 50%" in said[2]
