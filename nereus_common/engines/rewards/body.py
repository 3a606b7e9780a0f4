"""A worker body that scores samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus_common.engines.strangers import limit_memory, out_of_memory
from nereus_common.rl.rewards import RewardInput, checked, load_reward


@dataclass(frozen=True, slots=True)
class RewardBodyConfig:
    names: Sequence[str]
    memory_bytes: int


class RewardBody:
    """Loads the named rewards once; InvalidInput when one cannot be found."""

    def __init__(self, config: RewardBodyConfig) -> None:
        limit_memory(config.memory_bytes)
        self._rewards = {name: load_reward(name) for name in config.names}

    def score(self, name: str, sample: RewardInput) -> float:
        try:
            return checked(self._rewards[name](sample))
        except MemoryError as error:
            raise out_of_memory(name) from error
