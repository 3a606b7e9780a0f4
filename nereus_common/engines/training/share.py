"""A rank's share of a step: columns that were checked, cut into minibatches of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.core.ids import Head
from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.training.base import Columns, TrainStepSpec
from nereus_common.rl.losses import Loss, make_loss
from nereus_common.rl.policy_loss import PolicyLoss
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.value_loss import ValueLoss
from nereus_common.rl.weights import minibatches_of

_HEADS: Mapping[Head, type[Loss]] = {Head.LM: PolicyLoss, Head.SCORE: ValueLoss}
_INPUTS: Mapping[type[Loss], Mapping[str, str]] = {
    PolicyLoss: {"weight": "weights", "advantages": "advantages", "behaviour": "logprobs"},
    ValueLoss: {"weight": "weights", "before": "values", "returns": "returns"},
}
"""What a loss calls the rollout columns that it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one update trains on here: packs, and of each the loss's inputs, [R] by name; zeros where padded."""

    packs: Sequence[PackTensors]
    columns: Sequence[Mapping[str, Tensor]]

    @property
    def tokens(self) -> int:
        """Unmasked ones."""
        return sum(int((pack.source >= 0).sum()) for pack in self.packs)


def loss_for(head: Head, spec: TrainStepSpec) -> Loss:
    """InvalidInput when the step's numbers or the loss's options are wrong, or the loss is none for this head."""
    loss = make_loss(spec.loss)
    if not isinstance(loss, _HEADS[head]):
        raise InvalidInput(
            f"loss.name is {spec.loss['name']!r} and the model's head is {head}",
            remedy="train a vocabulary head with the policy loss, a score head with the value loss",
            field="loss.name",
        )
    limits = {"epochs": spec.epochs, "minibatch_tokens": len(spec.minibatch_tokens)}
    for field, value in {**limits, **({"temperature": spec.temperature} if head is Head.LM else {})}.items():
        if not value > 0:
            raise InvalidInput(f"{field} is {value}", remedy="it must be above 0", field=field)
    return loss


def read_columns(columns: Columns, loss: Loss, minibatches: int) -> RolloutBatch:
    """The rollout batch of one unit, perhaps without any group.

    InvalidInput names a column without a finite value for every token of the loss, or a minibatch that is none.
    """
    batch = RolloutBatch.from_columns(columns)
    if not batch.groups:
        return batch
    if minibatches > 1 and not len(batch.minibatch):
        raise InvalidInput(f"{minibatches} minibatches and no column that says which is which", field="minibatch")
    unknown = set(np.unique(batch.minibatch).tolist()) - set(range(minibatches))
    if unknown:
        raise InvalidInput(f"rollout column minibatch has {min(unknown)} of {minibatches}", field="minibatch")
    given = {name: column for name, column in batch.columns().items() if len(column)}
    loss.check_columns(given.keys())
    for name in _inputs(loss, batch).values():
        if batch.mask.any() and (name not in given or not np.isfinite(given[name][batch.mask]).all()):
            raise InvalidInput(
                f"rollout column {name} lacks a finite value for some unmasked token",
                remedy="compute it before the update, or mask the token",
                field=name,
            )
    return batch


def wanted_tokens(batch: RolloutBatch, minibatches: int) -> list[NDArray[np.bool_]]:
    """Of each minibatch, which tokens [R] its loss counts."""
    owner = np.repeat(minibatches_of(batch)[batch.group], batch.response_lengths)
    return [batch.mask & (owner == number) for number in range(minibatches)]


def loss_columns(batch: RolloutBatch, loss: Loss, step: int) -> dict[str, Tensor]:
    """What the loss reads besides the model's output, [R] by its own names. `step`: the version that fresh tokens were
    sampled by."""
    mask = torch.as_tensor(batch.mask)
    columns = {name: torch.as_tensor(getattr(batch, column)) for name, column in _inputs(loss, batch).items()}
    if isinstance(loss, PolicyLoss):
        columns["fresh"] = mask & torch.as_tensor(batch.versions == step)
        columns["sequence"] = torch.as_tensor(np.repeat(np.arange(batch.sequences), batch.response_lengths))
    return {**columns, "counted": mask}


def minibatch_of(packs: Sequence[PackTensors], columns: Mapping[str, Tensor]) -> Minibatch:
    return Minibatch(packs, [_gather(pack, columns) for pack in packs])


def _inputs(loss: Loss, batch: RolloutBatch) -> Mapping[str, str]:
    """Reference log-probs also where the loss only reports the distance from them."""
    reads_reference = isinstance(loss, PolicyLoss) and (loss.kl_beta or len(batch.reference))
    return {**_INPUTS[type(loss)], **({"reference": "reference"} if reads_reference else {})}


def _gather(pack: PackTensors, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pack's entries of the columns, on the pack's device. A unit without any token has packs all the same."""
    real, place = pack.source >= 0, pack.source.clamp(min=0)
    return {
        name: (
            torch.where(real, column[place], torch.zeros((), dtype=column.dtype))
            if len(column)
            else torch.zeros(len(place), dtype=column.dtype)
        ).to(pack.ids.device)
        for name, column in columns.items()
    }
