"""Writes recorded.json: what TRL's own PPOTrainer computes on a few tiny random models.

TRL dropped PPO after release 1.12.0, and all of its arithmetic stands inside `PPOTrainer.train`. This runs that very
method and reads its local variables at every backward pass. To repeat it, with TRL 1.12.0 unpacked beside the packages
of the development environment:

    PYTHONPATH=<folder with trl 1.12.0> python tests/unit/rl/trl_ppo/record.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer

WORDS = 32
EOS, PAD = 1, 0
RECORDED = Path(__file__).with_name("recorded.json")
SETTINGS: dict[str, Any] = {
    "gamma": 0.98,
    "lam": 0.9,
    "kl_coef": 0.3,
    "cliprange": 0.2,
    "cliprange_value": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "whole length, k1": {"kl_estimator": "k1"},
    "whole length, k3": {"kl_estimator": "k3"},
    "some end early": {"kl_estimator": "k1", "stop_token_id": EOS},
}
SEED = 2


def model(kind: type[Any], seed: int) -> Any:
    """Random, and large enough in scale for log-probs and values to differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.4,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        num_labels=1,
    )
    return kind(config)


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1", pad_token="w0", padding_side="left")


def record(folder: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """One rollout batch of eight and its two epochs of two minibatches. `seed`: one under which no pad is sampled."""
    np.random.seed(0)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=folder,
            seed=seed,
            use_cpu=True,
            bf16=False,
            report_to=[],
            total_episodes=8,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_mini_batches=2,
            num_ppo_epochs=2,
            num_sample_generations=0,
            response_length=6,
            temperature=0.8,
            learning_rate=2e-2,
            missing_eos_penalty=None,
            save_strategy="no",
            **SETTINGS,
            **options,
        ),
        processing_class=tokenizer(),
        model=model(LlamaForCausalLM, 1),
        ref_model=model(LlamaForCausalLM, 2),
        reward_model=model(LlamaForSequenceClassification, 3),
        value_model=model(LlamaForSequenceClassification, 4),
        train_dataset=Dataset.from_list([{"input_ids": [6 + index, 4, 5]} for index in range(8)]),
    )
    found: dict[str, Any] = {"updates": []}
    backward = trainer.accelerator.backward

    def watched(loss: torch.Tensor) -> None:
        seen = sys._getframe(1).f_locals
        if not found["updates"]:
            for name in ("scores", "values", "logprobs", "ref_logprobs", "advantages", "returns", "padding_mask"):
                found[name] = numbers(seen[name])
        policy, value = seen["pg_loss"], seen["vf_loss"]
        found["updates"].append(
            {
                "sequences": seen["micro_batch_inds"].tolist(),
                "logprobs": numbers(seen["new_logprobs"]),
                "values": numbers(seen["vpred"]),
                "policy_loss": numbers(policy),
                "value_loss": numbers(value),
                "policy_gradient": numbers(torch.autograd.grad(policy, seen["new_logprobs"], retain_graph=True)[0]),
                "value_gradient": numbers(torch.autograd.grad(value, seen["vpred"], retain_graph=True)[0]),
            }
        )
        backward(loss)

    trainer.accelerator.backward = watched
    trainer.train()
    return found


def numbers(tensor: torch.Tensor) -> Any:
    """Nested lists, floats in the nine digits that tell all float32 apart."""
    if tensor.dtype == torch.bool:
        return tensor.tolist()
    rounded = [float(f"{value:.9g}") for value in tensor.detach().float().flatten().tolist()]
    return np.array(rounded).reshape(tuple(tensor.shape)).tolist()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: {"options": options, **record(folder, SEED, options)} for name, options in CASES.items()}
    source = {"trl": sys.argv[1] if len(sys.argv) > 1 else "1.12.0", "torch": version("torch")}
    RECORDED.write_text(json.dumps({"source": source, "settings": SETTINGS, "cases": cases}, separators=(",", ":")))
