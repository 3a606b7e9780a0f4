"""A step computed the plain way, as the witness for every layout: Hugging Face's own forward on one sequence at a
time, the losses as their papers write them, autograd and torch's AdamW, in float64 on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from nereus_common.core.ids import Head, TensorName
from nereus_common.engines.training.base import TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rl.weights import Aggregation, minibatches_of
from tests.system.training_cases import LONGEST, Whole


def load_reference(folder: Path, head: Head = Head.LM) -> PreTrainedModel:
    kind = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model


def reference_logprobs(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> Tensor:
    """[R] log-probs, each sequence by itself."""
    return torch.cat([_logprobs(model, batch, sequence, temperature) for sequence in range(batch.sequences)])


@dataclass(frozen=True)
class ReferenceStep:
    """Of each update its loss and its gradients before clipping; parameter, exp_avg and exp_avg_sq after the last."""

    losses: list[float]
    gradients: list[dict[TensorName, NDArray[Any]]]
    after: dict[TensorName, list[NDArray[Any]]]

    def norm(self, update: int) -> float:
        return float(np.sqrt(sum((gradient**2).sum() for gradient in self.gradients[update].values())))


def reference_step(
    folder: Path,
    whole: Whole,
    batch: RolloutBatch,
    spec: TrainStepSpec,
    aggregation: Aggregation = "token",
    head: Head = Head.LM,
) -> ReferenceStep:
    """All updates of a step from the state `whole`."""
    model = load_reference(folder, head)
    named = {TensorName(name): parameter for name, parameter in model.named_parameters()}
    adam = torch.optim.AdamW(named.values(), lr=spec.learning_rate, weight_decay=0.0)
    for name, parameter in named.items():
        first, second = (torch.as_tensor(moment).double() for moment in whole[name][1:])
        adam.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": first, "exp_avg_sq": second}
    outputs = _Outputs(model, batch, spec, head)
    with torch.no_grad():
        before = [outputs(sequence) for sequence in range(batch.sequences)]
    losses, gradients = [], []
    for minibatch in list(range(len(spec.minibatch_tokens))) * spec.epochs:
        members = np.flatnonzero(minibatches_of(batch)[batch.group] == minibatch).tolist()
        parts = [outputs.losses(sequence, before[sequence]) for sequence in members]
        loss = _aggregated(parts, aggregation)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        gradients.append({name: _gradient(parameter).numpy().copy() for name, parameter in named.items()})
        torch.nn.utils.clip_grad_norm_(named.values(), spec.max_grad_norm or float("inf"))
        adam.step()
    after = {
        name: [parameter.detach().numpy(), *(adam.state[parameter][key].numpy() for key in ("exp_avg", "exp_avg_sq"))]
        for name, parameter in named.items()
    }
    return ReferenceStep(losses, gradients, after)


class _Outputs:
    """What the model says of one sequence, and the loss of its unmasked tokens."""

    def __init__(self, model: PreTrainedModel, batch: RolloutBatch, spec: TrainStepSpec, head: Head) -> None:
        self._model, self._batch, self._spec, self._head = model, batch, spec, head

    def __call__(self, sequence: int) -> Tensor:
        if self._head is Head.SCORE:
            return _values(self._model, self._batch, sequence)
        return _logprobs(self._model, self._batch, sequence, self._spec.temperature)

    def losses(self, sequence: int, before: Tensor) -> Tensor:
        span = self._batch.span(sequence)
        mask = torch.as_tensor(self._batch.mask[span])
        loss = self._value_loss if self._head is Head.SCORE else self._policy_loss
        return loss(self(sequence)[mask], before[mask], span, mask)

    def _policy_loss(self, logprobs: Tensor, before: Tensor, span: slice, mask: Tensor) -> Tensor:
        options = self._spec.loss
        advantages, behaviour = (
            torch.as_tensor(column[span]).double()[mask] for column in (self._batch.advantages, self._batch.logprobs)
        )
        distance = logprobs - before
        if options.get("ratio") == "sequence" and len(distance):
            distance = distance.mean().expand_as(distance)
        ratio = distance.exp()
        clipped = ratio.clamp(1 - options.get("clip_low", 0.2), 1 + options.get("clip_high", 0.2))
        trust = (before - behaviour).exp().clamp(max=options.get("tis_cap", float("inf")))
        weight = trust if "tis_cap" in options else torch.ones_like(trust)
        return -torch.minimum(ratio * advantages, clipped * advantages) * weight

    def _value_loss(self, values: Tensor, _: Tensor, span: slice, mask: Tensor) -> Tensor:
        before, returns = (
            torch.as_tensor(column[span]).double()[mask] for column in (self._batch.values, self._batch.returns)
        )
        clip = self._spec.loss["clip"]
        kept = torch.minimum(torch.maximum(values, before - clip), before + clip)
        return 0.5 * torch.maximum((values - returns) ** 2, (kept - returns) ** 2)


def _logprobs(model: PreTrainedModel, batch: RolloutBatch, sequence: int, temperature: float) -> Tensor:
    ids, prompt, response = _tokens(batch, sequence)
    scores = torch.log_softmax(model(input_ids=ids).logits[0, prompt - 1 : -1] / temperature, -1)
    return scores.gather(1, response[:, None])[:, 0]


def _values(model: Any, batch: RolloutBatch, sequence: int) -> Tensor:
    ids, prompt, _ = _tokens(batch, sequence)
    values: Tensor = model.score(model.model(input_ids=ids).last_hidden_state)[0, prompt - 1 : -1, 0]
    return values


def _tokens(batch: RolloutBatch, sequence: int) -> tuple[Tensor, int, Tensor]:
    """Token ids [1, T], the prompt's length, and the response [R]."""
    prompt, response = batch.prompt(int(batch.group[sequence])), torch.as_tensor(batch.response(sequence)).long()
    return torch.cat([torch.as_tensor(prompt).long(), response])[None], len(prompt), response


def _aggregated(parts: Sequence[Tensor], aggregation: Aggregation) -> Tensor:
    """A minibatch's loss from the per-token losses of its sequences."""
    match aggregation:
        case "token":
            return torch.cat(list(parts)).mean()
        case "sequence":
            return torch.stack([part.mean() for part in parts if len(part)]).mean()
        case "constant":
            return torch.cat(list(parts)).sum() / (len(parts) * LONGEST)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
