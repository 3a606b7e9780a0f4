"""The training units of a model, seen from the loop: a batch in, one result out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from nereus.v1 import training_pb2
from nereus.v1.training_pb2_grpc import TrainingServiceStub
from nereus_common.rl.assembly import share_groups
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import minibatch_tokens
from nereus_common.rpc import calling, chunks_from_columns
from nereus_common.rpc.together import together

from .placed import PlacedStage, PlacedUnit


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer updates of one RL step: what TrainStepHeader says, without the shares.

    The batch's column `minibatch` has values below `minibatches`, and may be empty where that is 1.
    """

    step: int
    loss: Mapping[str, Any]
    learning_rate: float
    max_grad_norm: float
    temperature: float
    epochs: int = 1
    minibatches: int = 1


@dataclass(frozen=True, slots=True)
class Updated:
    """`seconds` by phase of the slowest unit; `peak_memory_bytes` of the fullest rank."""

    version: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    peak_memory_bytes: int


class TrainingGroup:
    """All replicas of one trained model; each gets whole groups of every minibatch, and all are called at once."""

    def __init__(self, stage: PlacedStage, timeout: float) -> None:
        self._stage = stage
        self._timeout = timeout

    async def step(self, batch: RolloutBatch, update: Update) -> Updated:
        """All updates of a step on the whole batch, whose columns `weights` and `minibatch` were computed over it."""
        shares = share_groups(batch, len(self._stage.units))
        answers = await together(
            self._step_one(unit, batch, batch.select_groups(share), update)
            for unit, share in zip(self._stage.units, shares, strict=True)
        )
        slowest = max(answers, key=lambda answer: sum(answer.seconds.values()))
        return Updated(
            version=answers[0].version,
            metrics=dict(answers[0].metrics),
            seconds=dict(slowest.seconds),
            peak_memory_bytes=max(answer.peak_memory_bytes for answer in answers),
        )

    async def _step_one(
        self, unit: PlacedUnit, whole: RolloutBatch, share: RolloutBatch, update: Update
    ) -> training_pb2.TrainStepResponse:
        header = training_pb2.TrainStepHeader(
            unit_id=unit.id,
            epoch=unit.epoch,
            step=update.step,
            loss_json=json.dumps(dict(update.loss)),
            learning_rate=update.learning_rate,
            max_grad_norm=update.max_grad_norm,
            global_tokens=whole.loss_tokens,
            global_sequences=whole.sequences,
            temperature=update.temperature,
            pin_timeout_seconds=self._timeout / 2,
            minibatch_tokens=minibatch_tokens(whole, update.minibatches),
            epochs=update.epochs,
        )

        async def parts() -> AsyncIterator[training_pb2.TrainStepRequest]:
            yield training_pb2.TrainStepRequest(header=header)
            for chunk in chunks_from_columns(share.columns()):
                yield training_pb2.TrainStepRequest(chunk=chunk)

        with calling("TrainStep", unit.service):
            return await TrainingServiceStub(unit.channel).TrainStep(parts(), timeout=self._timeout)
