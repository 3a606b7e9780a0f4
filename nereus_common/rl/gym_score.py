"""The reward that a reasoning-gym task defines itself, partial credit included."""

from __future__ import annotations

from reasoning_gym.factory import get_score_answer_fn

from nereus_common.rl.rewards import RewardInput


def reasoning_gym_score(sample: RewardInput) -> float:
    """The score, in [0, 1], that the sample's task gives the response; KeyError when the sample has no task."""
    entry = {"question": sample.prompt, "answer": sample.answer, "metadata": dict(sample.metadata)}
    return float(get_score_answer_fn(sample.metadata["source_dataset"])(sample.response.strip(), entry))
