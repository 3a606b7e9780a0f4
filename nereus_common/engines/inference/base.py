"""What an inference engine is given and gives back. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import Head, TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import Box
from nereus_common.core.workflow import Work
from nereus_common.engines.options import Rendezvous

Columns = Mapping[str, NDArray[Any]]
Scored = Mapping[str, NDArray[np.float32]]
"""One column, named after the work: logprobs [R], values [R] or scores [N]."""

WORKS: Mapping[Head, tuple[Work, ...]] = {Head.LM: (Work.LOGPROBS,), Head.SCORE: (Work.VALUES, Work.SCORES)}
"""What inference can be asked of each head."""


def check_work(head: Head, work: str) -> Work:
    """`work` where `head` can do it, else InvalidInput naming both."""
    for known in WORKS[head]:
        if known == work:
            return known
    raise InvalidInput(
        f"work {work!r}: a model with head {head} cannot do it",
        remedy=f"it gives {' and '.join(WORKS[head])}",
        field="work",
    )


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """As for training: `shared_prefix` computes a group's prompt once; `threads` per process, 0: torch decides."""

    shared_prefix: bool = True
    threads: int = 0


@dataclass(frozen=True, slots=True)
class InferenceRankConfig:
    """One rank of one inference unit. The ranks of the unit meet at `rendezvous`; units do not know each other.

    `collective_timeout` seconds bounds every wait for another rank. `replica`: which of the stage's units it is.
    """

    unit: str
    model_path: str
    stage: StagePlan
    rank: int
    rendezvous: Rendezvous
    options: InferenceOptions = field(default_factory=InferenceOptions)
    transport: str = "ucx"
    collective_timeout: float = 120.0
    head: Head = Head.LM
    replica: int = 0


class InferenceEngine(Protocol):
    """One rank's engine. `score` is called on all ranks of the unit together."""

    @property
    def version(self) -> int: ...
    def load(self, version: int) -> None: ...
    def score(self, columns: Columns, work: str, temperature: float) -> Scored: ...
    def boxes(self) -> Mapping[TensorName, tuple[Box, ...]]: ...
    def digest(self, wire_dtype: str) -> int: ...
    def close(self) -> None: ...
