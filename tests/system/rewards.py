"""Rewards that tests name by path."""

from __future__ import annotations

import time

from nereus_common.rl.rewards import RewardInput


def digit_share(sample: RewardInput) -> float:
    """The share of digits in the response: what a random model can learn quickly."""
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


def unhurried_digit_share(sample: RewardInput) -> float:
    """The same, with time for what else goes on on the machine."""
    time.sleep(0.05)
    return digit_share(sample)


def raises(sample: RewardInput) -> float:
    raise ZeroDivisionError("this reward always raises")


def hangs(sample: RewardInput) -> float:
    time.sleep(3600)
    return 0.0
