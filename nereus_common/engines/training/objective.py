"""The loss of a pack, and the running sums that become the step's metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nereus_common.core.errors import InvalidInput
from nereus_common.engines.torch_model.packs import PackTensors
from nereus_common.engines.torch_model.world import World
from nereus_common.engines.training.base import Columns
from nereus_common.rl.losses import MEANS, Grpo, TokenBatch
from nereus_common.rl.rollouts import RolloutBatch


def read_columns(columns: Columns) -> RolloutBatch:
    """The rollout batch; InvalidInput names a column without a finite value for every token of the loss."""
    batch = RolloutBatch.from_columns(columns)
    optional = {name: getattr(batch, name) for name in ("proximal", "reference") if len(getattr(batch, name))}
    for name, values in {"advantages": batch.advantages, "logprobs": batch.logprobs, **optional}.items():
        if not np.isfinite(values[batch.mask]).all():
            raise InvalidInput(
                f"rollout column {name} lacks a finite value for some unmasked token",
                remedy="compute it before the update, or mask the token",
                field=name,
            )
    return batch


class Objective:
    """Loss and metrics of one update's share of the batch on this rank."""

    def __init__(
        self,
        loss: Grpo,
        batch: RolloutBatch,
        packs: Sequence[PackTensors],
        global_tokens: int,
        device: torch.device,
    ) -> None:
        self._loss, self._packs, self._global_tokens, self._device = loss, packs, global_tokens, device
        self._columns = {
            "weight": torch.as_tensor(batch.mask).float(),
            "advantages": torch.as_tensor(batch.advantages),
            "behaviour": torch.as_tensor(batch.logprobs),
        }
        for name in ("proximal", "reference"):
            if len(getattr(batch, name)):
                self._columns[name] = torch.as_tensor(getattr(batch, name))
        self._sums = dict.fromkeys((*MEANS, "tokens"), 0.0)
        self._gap_max = 0.0

    def __call__(self, index: int, scores: Tensor) -> Tensor:
        """The differentiable loss of pack `index` from its log-probs and entropies [1, 2, R]."""
        source = self._packs[index].source
        real = source >= 0
        given = {
            name: torch.where(real, column[source.clamp(min=0)], 0.0) if len(column) else torch.zeros(len(source))
            for name, column in self._columns.items()
        }
        moved = {name: column.to(self._device) for name, column in given.items()}
        outcome = self._loss(
            TokenBatch(logprobs=scores[0, 0], entropy=scores[0, 1].detach(), **moved), self._global_tokens
        )
        for name, value in outcome.sums.items():
            self._sums[name] += float(value)
        self._sums["tokens"] += float(given["weight"].sum())
        self._gap_max = max(self._gap_max, float(outcome.gap_max))
        return outcome.loss

    def metrics(self, world: World) -> dict[str, float]:
        """Means over the global batch, equal on every rank; InvalidInput when the global token count was wrong."""
        speaks = world.last_stage and world.place.tp == 0
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64) * speaks
        largest = torch.tensor(self._gap_max * speaks, dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        total = dict(zip(self._sums, sums.tolist(), strict=True))
        tokens = total.pop("tokens")
        if tokens != self._global_tokens:
            raise InvalidInput(
                f"the batch has {tokens:.0f} unmasked tokens over all ranks, the step was told {self._global_tokens}",
                remedy="count the unmasked tokens of the whole batch",
                field="global_tokens",
            )
        means = {name: value / max(tokens, 1.0) for name, value in total.items()}
        return {**means, "logprob_gap_max": float(largest), "tokens": tokens}
