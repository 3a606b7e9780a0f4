"""How far a job has come, between two steps: all a resumed loop needs to know beside the models' state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`step`: steps done, which is also the version that all units hold. `position`: the next prompt to be consumed;
    every earlier one has been, once, or was replaced by the algorithm."""

    step: int = 0
    position: int = 0
