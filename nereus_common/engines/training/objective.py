"""The loss of a pack, and the running sums that become the step's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.torch_model.world import World
from nereus_common.engines.training.base import Columns
from nereus_common.rl.losses import Loss
from nereus_common.rl.policy_loss import PolicyLoss, TokenBatch
from nereus_common.rl.rollouts import RolloutBatch


def read_columns(columns: Columns) -> RolloutBatch:
    """The rollout batch; InvalidInput names a column without a finite value for every token of the loss."""
    batch = RolloutBatch.from_columns(columns)
    optional = {name: getattr(batch, name) for name in ("reference", "weights") if len(getattr(batch, name))}
    for name, values in {"advantages": batch.advantages, "logprobs": batch.logprobs, **optional}.items():
        if not np.isfinite(values[batch.mask]).all():
            raise InvalidInput(
                f"rollout column {name} lacks a finite value for some unmasked token",
                remedy="compute it before the update, or mask the token",
                field=name,
            )
    return batch


class Objective:
    """Loss and metrics of one minibatch's share on this rank. `step`: the version that fresh tokens were sampled by."""

    def __init__(
        self,
        loss: Loss,
        batch: RolloutBatch,
        packs: Sequence[PackTensors],
        global_tokens: int,
        step: int,
        device: torch.device,
    ) -> None:
        assert isinstance(loss, PolicyLoss)
        self._loss, self._packs, self._global_tokens, self._device = loss, packs, global_tokens, device
        mask = torch.as_tensor(batch.mask)
        owner = np.repeat(np.arange(batch.sequences), batch.response_lengths)
        self._columns = {
            "counted": mask,
            "fresh": mask & torch.as_tensor(batch.versions == step),
            "weight": torch.as_tensor(batch.weights),
            "sequence": torch.as_tensor(owner),
            "advantages": torch.as_tensor(batch.advantages),
            "behaviour": torch.as_tensor(batch.logprobs),
        }
        if len(batch.reference):
            self._columns["reference"] = torch.as_tensor(batch.reference)
        self._means = {name: [0.0, 0.0] for name in loss.MEANS}
        self._largest = dict.fromkeys(loss.LARGEST, 0.0)
        self._totals = {"loss": 0.0, "tokens": 0.0}

    def __call__(self, index: int, scores: Tensor) -> Tensor:
        """The differentiable loss of pack `index` from its log-probs and entropies [1, 2, R]."""
        source = self._packs[index].source
        real, place = source >= 0, source.clamp(min=0)
        given = {
            name: torch.where(real, column[place], torch.zeros((), dtype=column.dtype))
            if len(column)
            else torch.zeros(len(source), dtype=column.dtype)
            for name, column in self._columns.items()
        }
        moved = {name: column.to(self._device) for name, column in given.items()}
        outcome = self._loss(TokenBatch(logprobs=scores[0, 0], entropy=scores[0, 1].detach(), **moved))
        for name, (total, count) in outcome.means.items():
            self._means[name][0] += float(total)
            self._means[name][1] += float(count)
        for name, value in outcome.largest.items():
            self._largest[name] = max(self._largest[name], float(value))
        self._totals["loss"] += float(outcome.loss.detach())
        self._totals["tokens"] += float(given["counted"].sum())
        return outcome.loss

    def metrics(self, world: World) -> dict[str, float]:
        """Means over the minibatch, equal on every rank; InvalidInput when the token count was wrong."""
        speaks = world.last_stage and world.place.tp == 0
        sums = (
            torch.tensor([*self._totals.values(), *chain.from_iterable(self._means.values())], dtype=torch.float64)
            * speaks
        )
        largest = torch.tensor(list(self._largest.values()), dtype=torch.float64) * speaks
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        loss, tokens, *pairs = sums.tolist()
        if tokens != self._global_tokens:
            raise InvalidInput(
                f"the batch has {tokens:.0f} unmasked tokens over all ranks, the step was told {self._global_tokens}",
                remedy="count the unmasked tokens of the whole batch",
                field="minibatch_tokens",
            )
        means = {name: pairs[2 * index] / max(pairs[2 * index + 1], 1.0) for index, name in enumerate(self._means)}
        return {"loss": loss, **means, **dict(zip(self._largest, largest.tolist(), strict=True)), "tokens": tokens}
