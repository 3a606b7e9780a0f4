"""What a job may set about a generation engine, beyond its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from nereus_common.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """`block_size`: tokens per KV block, the grain of prefix sharing; None: the engine's choice.

    `omp_threads_bind`: cores of each rank as vLLM writes them ("0-3|4-7"), or "auto" or "nobind"; None: one core per
    rank, after the number of its device. `float32_head`: logits in float32 whatever the model's dtype.
    `spin_seconds`: how long an idle vLLM process polls before it blocks.
    """

    block_size: int | None = 32
    omp_threads_bind: str | None = None
    float32_head: bool = True
    spin_seconds: float = 0.0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """InvalidInput names a key that is unknown."""
        known = {option.name for option in fields(cls)}
        for key in given:
            if key not in known:
                raise InvalidInput(
                    f"generation option {key} is unknown", remedy=f"known: {', '.join(sorted(known))}", field=key
                )
        return cls(**given)
