"""A step's tasks wait for what they read, and the value says which model-stages an algorithm needs."""

from __future__ import annotations

import pytest

from nereus_common.core.errors import InvalidInput
from nereus_common.core.workflow import Task, Work, Workflow, rl_workflow

pytestmark = pytest.mark.fast


def names(workflow: Workflow) -> list[list[str]]:
    return [[task.name for task in wave] for wave in workflow.waves()]


def test_ppo_scores_side_by_side_and_updates_both_models_last() -> None:
    workflow = rl_workflow(critic=True, reference=True, reward_models=["judge"])
    assert names(workflow) == [
        ["rollouts"],
        ["score with judge", "reward functions", "reference", "critic values"],
        ["rewards"],
        ["advantages"],
        ["update critic", "update actor"],
    ]
    assert [str(stage) for stage in workflow.model_stages] == [
        "actor/generation",
        "actor/training",
        "critic/inference",
        "critic/training",
        "judge/inference",
        "reference/inference",
    ]
    assert workflow.trained == ("actor", "critic")


def test_grpo_needs_an_actor_and_nothing_else() -> None:
    workflow = rl_workflow()
    assert [str(stage) for stage in workflow.model_stages] == ["actor/generation", "actor/training"]
    assert names(workflow)[-1] == ["update actor"]


def test_remax_scores_the_greedy_responses_as_it_does_the_sampled_ones() -> None:
    workflow = rl_workflow(baseline=True, reward_models=["judge"])
    before = {task.name for task in workflow.needs(workflow["score with judge"])}
    assert before == {task.name for task in workflow.needs(workflow["reward functions"])} == {"rollouts", "baseline"}


def test_an_environment_alone_can_reward() -> None:
    assert names(rl_workflow(reward_functions=False))[1] == ["rewards"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", Work.SAMPLE, None, ("x",))], "reads x, which no task writes"),
        ([Task("a", Work.SAMPLE, None, (), ("x",)), Task("b", Work.SAMPLE, None, (), ("x",))], "output x occurs twice"),
        ([Task("a", Work.SAMPLE, None), Task("a", Work.SAMPLE, None)], "task a occurs twice"),
        (
            [Task("a", Work.SAMPLE, None, ("y",), ("x",)), Task("b", Work.SAMPLE, None, ("x",), ("y",))],
            "tasks a, b wait for each other",
        ),
    ],
)
def test_what_cannot_run_is_refused(tasks: list[Task], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Workflow(tuple(tasks))


def test_a_task_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidInput, match="no task judge"):
        rl_workflow()["judge"]
