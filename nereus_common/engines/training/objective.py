"""The loss of a pack, the policy before the step that it compares with, and the sums that become metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from nereus_common.engines.torch_model.world import World
from nereus_common.engines.training.microbatches import LossOf
from nereus_common.engines.training.share import Minibatch
from nereus_common.rl.loss_sums import LossSums
from nereus_common.rl.losses import Loss
from nereus_common.rl.policy_loss import PolicyLoss, TokenBatch
from nereus_common.rl.value_loss import ValueBatch


class Objective:
    """What a step's updates minimise on this rank.

    Proximal log-probs, those of the policy before the step, are kept per pack on its device, in float32. For the first
    minibatch they are what the first update's own forward gave; those of the other minibatches (`unseen`) must be
    given to `remember` before the first update.
    """

    def __init__(self, loss: Loss, minibatches: Sequence[Minibatch], updates: int) -> None:
        self._loss, self._minibatches, self._updates = loss, minibatches, updates
        self._remembers = updates > 1 and isinstance(loss, PolicyLoss)
        self._proximal: dict[tuple[int, int], Tensor] = {}
        device = minibatches[0].packs[0].ids.device
        self._sums = torch.zeros(1 + 2 * len(loss.MEANS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(len(loss.LARGEST), dtype=torch.float64, device=device)

    def unseen(self) -> Iterator[tuple[int, Minibatch]]:
        """Minibatches, with their numbers, that are first trained on when the policy has already moved."""
        return iter(list(enumerate(self._minibatches))[1:] if self._remembers else ())

    def remember(self, minibatch: int, pack: int, scores: Tensor) -> None:
        """The policy's log-probs before the step, from its [1, 2, R] scores of a pack."""
        self._proximal[minibatch, pack] = scores[0, 0].detach().clone()

    def of(self, minibatch: int) -> LossOf:
        """The differentiable loss by pack of the minibatch; calling it adds to the metrics."""
        return partial(self._loss_of, minibatch)

    def _loss_of(self, minibatch: int, pack: int, scores: Tensor) -> Tensor:
        columns = self._minibatches[minibatch].columns[pack]
        if isinstance(self._loss, PolicyLoss):
            proximal = self._proximal.get((minibatch, pack))
            if self._remembers and proximal is None:
                self.remember(minibatch, pack, scores)
            entropy = scores[0, 1].detach()
            outcome = self._loss(TokenBatch(logprobs=scores[0, 0], entropy=entropy, proximal=proximal, **columns))
        else:
            outcome = self._loss(ValueBatch(values=scores[0, 0], **columns))
        self._add(outcome)
        return outcome.loss

    def _add(self, outcome: LossSums) -> None:
        """Kept on the device: reading a number there would wait for the pack."""
        pairs = chain.from_iterable(outcome.means[name] for name in self._loss.MEANS)
        self._sums += torch.stack([value.detach().double() for value in (outcome.loss, *pairs)])
        if self._loss.LARGEST:
            found = torch.stack([outcome.largest[name].double() for name in self._loss.LARGEST])
            self._largest = torch.maximum(self._largest, found)

    def metrics(self, world: World) -> dict[str, float]:
        """As `TrainStepResult` says, of the loss alone; equal on every rank, which all call this."""
        speaks = world.last_stage and world.place.tp == 0
        sums, largest = self._sums.cpu() * speaks, self._largest.cpu() * speaks
        dist.all_reduce(sums)
        if len(largest):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        loss, *pairs = sums.tolist()
        named = zip(self._loss.MEANS, pairs[::2], pairs[1::2], strict=True)
        means = {name: total / count for name, total, count in named if count}
        extremes = dict(zip(self._loss.LARGEST, largest.tolist(), strict=True))
        kept = {name: value for name, value in extremes.items() if name.removesuffix("_max") in means}
        return {"loss": loss / self._updates, **means, **kept}
