"""Rewards that go wrong, each in its own way; run in reward processes by their path."""

from __future__ import annotations

import os
import time

from nereus_common.rl.rewards import RewardInput


def length(sample: RewardInput) -> float:
    return float(len(sample.response))


def slow(sample: RewardInput) -> float:
    time.sleep(60 if sample.response == "hang" else 0)
    return 1.0


def raising(sample: RewardInput) -> float:
    return 1.0 / len(sample.response)


def vanishing(sample: RewardInput) -> float:
    if sample.response == "die":
        os._exit(3)
    return 1.0


def nonsense(sample: RewardInput) -> str:
    return "good"


def process(sample: RewardInput) -> float:
    return float(os.getpid())


def greedy(sample: RewardInput) -> float:
    return float(len(bytearray(4 << 30 if sample.response == "eat" else 1)))
