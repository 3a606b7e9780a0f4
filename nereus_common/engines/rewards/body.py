"""A worker body that scores samples."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_common.rl.rewards import RewardInput, checked, load_reward


class RewardBody:
    """Loads the named rewards once; InvalidInput when one cannot be found."""

    def __init__(self, names: Sequence[str]) -> None:
        self._rewards = {name: load_reward(name) for name in names}

    def score(self, name: str, sample: RewardInput) -> float:
        return checked(self._rewards[name](sample))
