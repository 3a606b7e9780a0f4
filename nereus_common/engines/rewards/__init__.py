"""Rewards in worker processes: `pool` is the parent, `body` the child."""

from nereus_common.engines.rewards.pool import RewardPool, TimedReward

__all__ = ["RewardPool", "TimedReward"]
