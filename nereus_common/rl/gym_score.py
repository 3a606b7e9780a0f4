"""The reward that a reasoning-gym task defines itself, partial credit included; as a reward and as an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from reasoning_gym.factory import DATASETS, get_score_answer_fn

from nereus_common.core.errors import InvalidInput
from nereus_common.rl.environments import Observation, Task
from nereus_common.rl.rewards import RewardInput


def reasoning_gym_score(sample: RewardInput) -> float:
    """The score, in [0, 1], that the sample's task gives the response; InvalidInput when the sample has no task."""
    return _score(sample.response, sample.prompt, sample.answer, sample.metadata)


class ReasoningGym:
    """Lets the model try again until its answer is right, which ends the episode.

    An answer is right when the task's own score reaches `solved`; the reward is that score times `discount` for every
    earlier try, and 0 for a wrong one. `retry` is what a wrong answer is told.
    """

    def __init__(
        self, discount: float = 1.0, solved: float = 1.0, retry: str = "That is not right. Please try again."
    ) -> None:
        if not 0 < discount <= 1 or not 0 < solved <= 1:
            raise InvalidInput(
                f"discount is {discount} and solved {solved}", remedy="0 < both <= 1", field="environment.options"
            )
        self._discount = discount
        self._solved = solved
        self._retry = retry
        self._tries = 0

    def reset(self, task: Task) -> None:
        self._task = task
        self._tries = 0
        _scorer(_dataset(task.metadata))

    def step(self, response: str) -> Observation:
        score = _score(response, self._task.prompt, self._task.answer, self._task.metadata)
        earlier, self._tries = self._tries, self._tries + 1
        if score < self._solved:
            return Observation(self._retry)
        return Observation(reward=score * self._discount**earlier, done=True)


def _score(response: str, question: str, answer: str, metadata: Mapping[str, Any]) -> float:
    entry = {"question": question, "answer": answer, "metadata": dict(metadata)}
    return float(_scorer(_dataset(metadata))(response.strip(), entry))


def _dataset(metadata: Mapping[str, Any]) -> str:
    name = str(metadata.get("source_dataset", ""))
    if name not in DATASETS:
        raise InvalidInput(
            f"the prompt is of no reasoning-gym task: its source_dataset is {name!r}",
            remedy="take prompts from a task, or another reward",
            field="prompts",
        )
    return name


@cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return scorer
