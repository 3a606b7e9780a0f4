"""Every job file that is shipped can be loaded, and the plans in them fit the model and the default cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.cluster.config import ClusterConfig
from nereus.demo.job import TASKS, commonest_answer, demo_spec
from nereus.spec import JobSpec
from nereus.spec_file import load_spec
from nereus_common.core.errors import InvalidInput
from nereus_common.rl.environments import Observation, Task, load_environment
from nereus_common.rl.rewards import RewardInput, load_reward

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".toml"))
DEVICES = ClusterConfig().device_ids
LAYERS, QUERY_HEADS, KV_HEADS = 30, 9, 3
"""Of SmolLM2-135M."""


def test_there_are_three_different_plans() -> None:
    plans = [load_spec(EXAMPLES / name).explicit_plan for name in FILES]
    assert len({plan.id for plan in plans if plan is not None}) >= 3


@pytest.mark.parametrize("name", FILES)
def test_an_example_loads_and_its_plan_fits(name: str) -> None:
    spec = load_spec(EXAMPLES / name)
    plan = spec.explicit_plan
    for _, stage in plan.stages if plan else ():
        stage.layout.layer_counts(LAYERS)
        assert QUERY_HEADS % stage.layout.tp == 0 and KV_HEADS % stage.layout.tp == 0
        assert {str(device) for device in stage.devices} <= set(DEVICES)


def test_the_example_with_a_file_and_a_reward_of_its_own_is_complete() -> None:
    spec = load_spec(EXAMPLES / "sums.toml")
    questions = spec.prompts.open(spec.seed, spec.evaluation.size)
    assert (len(questions.examples), len(questions.heldout), len(questions.train)) == (3, 20, 22)
    brevity = load_reward(spec.rewards[1].name)
    assert brevity(RewardInput(0, 0, "q", "3", response_token_ids=(1, 2))) == 1.0


def test_the_calculator_answers_calls_and_scores_the_final_answer() -> None:
    spec = load_spec(EXAMPLES / "calculator.yaml")
    assert spec.environment is not None
    episode = load_environment(spec.environment.name, spec.environment.options)()
    questions = spec.prompts.open(spec.seed, spec.evaluation.size)
    episode.reset(Task(0, 0, questions.train[0].text, questions.train[0].answer))
    assert episode.step("let me see\ncalc: 12*(7 - 2.5)//2") == Observation("27", -0.05)
    for expression in ("__import__('os')", "9**9", "1/0", "1 +", "(" * 50 + ")" * 50, "9" * 101, "True"):
        assert episode.step(f"calc: {expression}").text.startswith("error: ")
    assert episode.step(f"{questions.train[0].answer}.") == Observation(reward=1.0, done=True)


@pytest.mark.parametrize("task", TASKS)
def test_the_demo_has_a_job_for_each_of_its_tasks(task: str) -> None:
    spec = demo_spec(DEVICES, task=task, steps=5, seed=0, heldout=200)
    assert spec.explicit_plan is not None
    assert set(map(str, spec.explicit_plan.devices)) == set(DEVICES)
    assert JobSpec.from_json(spec.to_json()) == spec
    assert len(spec.prompts.open(spec.seed, 1).train) >= 16


def test_the_demos_default_task_is_not_won_by_one_answer_alone() -> None:
    spec = demo_spec(DEVICES, task="letter_counting", steps=5, seed=0, heldout=200)
    assert 0.5 < commonest_answer(spec) < 0.9


def test_an_unknown_demo_task_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has no task 'chess'"):
        demo_spec(DEVICES, task="chess", steps=1, seed=0, heldout=1)
