"""What a training engine is given and gives back. Imports no torch: services and planners use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nereus_common.checkpoints.state import BoxState, Digests
from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import Head, TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import Box
from nereus_common.engines.options import Optimizer, Rendezvous

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Engine options of a training unit. `shared_prefix`: compute a group's prompt once for all its responses.

    `threads` per process, 0: torch decides. `redundancy` 1: another process keeps copies of each rank's state.
    """

    optimizer: Optimizer = field(default_factory=Optimizer)
    shared_prefix: bool = True
    threads: int = 0
    redundancy: int = 0

    def __post_init__(self) -> None:
        if self.redundancy not in (0, 1):
            raise InvalidInput(f"options.redundancy is {self.redundancy}", remedy="0 or 1", field="options.redundancy")


@dataclass(frozen=True, slots=True)
class TrainingRankConfig:
    """One rank of one training unit. All units of the model-stage meet at `rendezvous`.

    `head` decides which loss it trains with: the vocabulary the policy's, the score the value's. `collective_timeout`
    seconds bounds every wait for another rank.
    """

    unit: str
    model_path: str
    stage: StagePlan
    replica: int
    rank: int
    rendezvous: Rendezvous
    options: TrainingOptions = field(default_factory=TrainingOptions)
    seed: int = 0
    transport: str = "ucx"
    collective_timeout: float = 120.0
    head: Head = Head.LM


@dataclass(frozen=True, slots=True)
class TrainStepSpec:
    """The updates of one RL step: every minibatch, in order, once per epoch; from version `step` to `step + 1`.

    loss: {"name": "policy", …} or {"name": "value", …}. max_grad_norm: 0 for no clipping. minibatch_tokens: unmasked
    response tokens of each minibatch, over all units; as many entries as the column `minibatch` has values.
    """

    step: int
    loss: Mapping[str, Any]
    learning_rate: float
    max_grad_norm: float
    minibatch_tokens: tuple[int, ...]
    epochs: int = 1
    temperature: float = 1.0

    @property
    def updates(self) -> int:
        """Optimizer updates of the step."""
        return self.epochs * len(self.minibatch_tokens)


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """Metrics of the global batch, the same on every rank; seconds by phase and peak memory of this rank.

    `loss` and `grad_norm` (before clipping) are means over the updates, `grad_norm_max` and those of the loss that end
    in `_max` the largest of all updates. Every other metric of the loss is a mean over the tokens of all updates.
    `logprob_gap` compares the sampler with the policy before the step on tokens of the step's own version. A mean over
    no token, and the maximum beside it, are left out. `tokens`: unmasked ones of the batch; `updates`: how many.
    """

    version: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class TensorState:
    """A rank's part of one tensor and of its optimizer state; the arrays are copies of shape `box.shape`."""

    box: Box
    parameter: NDArray[Any]
    exp_avg: NDArray[Any]
    exp_avg_sq: NDArray[Any]
    step: int


class TrainingEngine(Protocol):
    """One rank's engine. Calls that reduce over ranks (`train_step`) are made on all ranks together."""

    @property
    def version(self) -> int: ...
    @property
    def parts(self) -> Mapping[TensorName, Any]: ...
    def load(self, version: int) -> None: ...
    def restore(self, version: int, checkpoint: Path, model: str) -> Digests: ...
    def snapshot(self, version: int) -> Iterator[BoxState]: ...
    def train_step(self, spec: TrainStepSpec, columns: Columns) -> TrainStepResult: ...
    def boxes(self) -> Mapping[TensorName, tuple[Box, ...]]: ...
    def wire_copies(self, wire_dtype: str) -> Mapping[TensorName, list[tuple[Box, NDArray[Any]]]]: ...
    def digest(self, wire_dtype: str) -> int: ...
    def state(self) -> Mapping[TensorName, TensorState]: ...
    def load_state(self, state: Mapping[TensorName, TensorState], version: int) -> None: ...
    def state_boxes(self) -> Mapping[TensorName, tuple[Box, ...]]: ...
    def offer(self, version: int) -> Mapping[TensorName, Sequence[tuple[Box, Any]]]: ...
    def withdraw(self) -> None: ...
    def drop(self, tensors: Iterable[TensorName]) -> None: ...
    def lacking(self, version: int, asked: Sequence[tuple[TensorName, Box]]) -> Sequence[tuple[Box, ...]]: ...
    def put(self, tensor: TensorName, box: Box, data: NDArray[np.uint8]) -> None: ...
    def filled(self, version: int, *, whole: bool) -> None: ...
    def state_digests(self, version: int) -> Mapping[str, int]: ...
    def close(self) -> None: ...
