"""A reward of one's own: a plain function of one sample."""

from nereus import RewardInput


def brevity(sample: RewardInput) -> float:
    """1 for an answer that ended by itself within four tokens, else 0."""
    return float(sample.finished and len(sample.response_token_ids) <= 4)
