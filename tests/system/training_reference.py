"""One update computed the plain way, as the witness for every layout: Hugging Face's own forward on one sequence at a
time, autograd and torch's AdamW, in float64 on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nereus_common.core.ids import TensorName
from nereus_common.engines.training.base import TrainStepSpec
from nereus_common.rl.rollouts import RolloutBatch
from tests.system.training_cases import Whole


def load_reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return model


def reference_logprobs(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> Tensor:
    """[R] log-probs, each sequence by itself."""
    parts = []
    for sequence in range(batch.sequences):
        prompt, response = batch.prompt(int(batch.group[sequence])), batch.response(sequence)
        ids = torch.as_tensor([*prompt.tolist(), *response.tolist()])[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        scores = torch.log_softmax(logits, -1)
        parts.append(scores.gather(1, torch.as_tensor(response).long()[:, None])[:, 0])
    return torch.cat(parts)


def reference_update(
    folder: Path, whole: Whole, batch: RolloutBatch, spec: TrainStepSpec
) -> tuple[dict[TensorName, list[NDArray[Any]]], float]:
    """(gradient before clipping, parameter, exp_avg, exp_avg_sq after the update) by name, and the gradient's norm.

    The loss is GRPO's with ratio one and weights truncated at `tis_cap`.
    """
    model = load_reference(folder)
    logprobs = reference_logprobs(model, batch, spec.temperature)
    mask = torch.as_tensor(batch.mask)
    weight = torch.exp(logprobs.detach() - torch.as_tensor(batch.logprobs)).clamp(max=spec.loss["tis_cap"])
    gain = torch.as_tensor(batch.advantages).nan_to_num() * weight * logprobs
    (-(gain * mask).sum() / mask.sum()).backward()  # type: ignore[no-untyped-call]
    named = {TensorName(name): parameter for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(named.values(), spec.max_grad_norm or float("inf"))
    adam = torch.optim.AdamW(named.values(), lr=spec.learning_rate, weight_decay=0.0)
    for name, parameter in named.items():
        first, second = (torch.as_tensor(moment).double() for moment in whole[name][1:])
        adam.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": first, "exp_avg_sq": second}
    adam.step()
    found = {
        name: [
            gradients[name].numpy(),
            parameter.detach().numpy(),
            adam.state[parameter]["exp_avg"].numpy(),
            adam.state[parameter]["exp_avg_sq"].numpy(),
        ]
        for name, parameter in named.items()
    }
    return found, float(norm)
