"""Tiny models, batches and states for tests of the torch engines, and the work done in rank processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_common.core.ids import DeviceId, Head, TensorName
from nereus_common.core.layout import parse_replicated
from nereus_common.core.plan import Dtypes, StagePlan
from nereus_common.core.transfer import Box
from nereus_common.engines.options import Rendezvous
from nereus_common.engines.training.base import (
    TensorState,
    TrainingOptions,
    TrainingRankConfig,
    TrainStepResult,
    TrainStepSpec,
)
from nereus_common.rl.assembly import share_groups
from nereus_common.rl.rollouts import RolloutBatch, offsets
from nereus_common.rl.weights import Aggregation, cut_minibatches, loss_weights, minibatch_tokens, minibatches_of
from nereus_common.rpc.ports import free_port

VOCABULARY = 131
"""Not a multiple of any degree."""
LONGEST = 9
"""Tokens of a response at most."""

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, **_BASE},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_BASE},
    "llama-biased": {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, **_BASE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **_BASE},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8, **_BASE},
}
OF_THREE = {
    "llama-three": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        **_BASE,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }
}
"""For layouts that the heads of the others do not divide by."""


def save_model(name: str, folder: Path, max_shard_size: str = "1GB", head: Head = Head.LM) -> Path:
    """A random model of the named kind as a Hugging Face folder; every parameter is random, norms and biases too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(11)
    kind = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    config = AutoConfig.for_model(**(MODELS | OF_THREE)[name], **({} if head is Head.LM else {"num_labels": 1}))
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_batch(
    seed: int = 3,
    groups: int = 6,
    per_group: int = 4,
    masked: float = 0.1,
    minibatches: int = 1,
    aggregation: Aggregation = "token",
) -> RolloutBatch:
    """Groups with prompts of 3–12 tokens and responses of 1–9; one whole sequence is masked."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, 13, groups)
    lengths = rng.integers(1, LONGEST + 1, groups * per_group)
    tokens = int(lengths.sum())
    mask = rng.random(tokens) >= masked
    response_offsets = offsets(lengths)
    mask[response_offsets[2] : response_offsets[3]] = False
    batch = RolloutBatch(
        prompt_tokens=rng.integers(0, VOCABULARY, prompts.sum(), dtype=np.int32),
        prompt_offsets=offsets(prompts),
        position=np.arange(groups, dtype=np.int64),
        group=np.repeat(np.arange(groups, dtype=np.int32), per_group),
        response_tokens=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
        response_offsets=response_offsets,
        logprobs=(-4 + rng.random(tokens)).astype(np.float32),
        versions=np.zeros(tokens, np.int32),
        mask=mask,
        finished=np.ones(len(lengths), np.bool_),
        rewards=rng.random(len(lengths)).astype(np.float32),
        advantages=np.where(mask, rng.standard_normal(tokens), np.nan).astype(np.float32),
    )
    return with_minibatches(
        batch.with_columns(values=rng.standard_normal(tokens), returns=rng.standard_normal(tokens)),
        minibatches,
        aggregation,
    )


def with_minibatches(batch: RolloutBatch, minibatches: int, aggregation: Aggregation = "token") -> RolloutBatch:
    """The columns that a controller computes last."""
    cut = batch.with_columns(minibatch=cut_minibatches(batch.groups, minibatches)) if minibatches > 1 else batch
    return cut.with_columns(weights=loss_weights(cut, minibatches, aggregation, longest=LONGEST))


def make_plan(layout: str, dtype: str = "float32", microbatch_tokens: int = 96, **knobs: Any) -> StagePlan:
    cut, replicas = parse_replicated(layout)
    devices = tuple(DeviceId("node0", f"cpu{index}") for index in range(cut.ranks * replicas))
    return StagePlan(cut, devices, replicas, microbatch_tokens, dtypes=Dtypes(compute=dtype), **knobs)


def rank_configs(
    model: Path,
    plan: StagePlan,
    options: TrainingOptions | None = None,
    transport: str = "loopback",
    head: Head = Head.LM,
) -> list[TrainingRankConfig]:
    """All ranks of all replicas, in world order, on a free port."""
    rendezvous = Rendezvous("127.0.0.1", free_port(), "test")
    chosen = options or TrainingOptions(threads=1)
    return [
        TrainingRankConfig(
            f"unit{replica}",
            str(model),
            plan,
            replica,
            rank,
            rendezvous,
            chosen,
            transport=transport,
            collective_timeout=20.0,
            head=head,
        )
        for replica in range(plan.replicas)
        for rank in range(plan.layout.ranks)
    ]


def shares(batch: RolloutBatch, replicas: int) -> list[RolloutBatch]:
    """Whole groups over replicas, as a controller cuts them."""
    return [batch.select_groups(share) for share in share_groups(batch, replicas)]


def step_spec(batch: RolloutBatch, step: int = 0, **changed: Any) -> TrainStepSpec:
    values: dict[str, Any] = {
        "step": step,
        "loss": {"name": "policy", "tis_cap": 2.0},
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "minibatch_tokens": minibatch_tokens(batch, int(minibatches_of(batch).max(initial=0)) + 1),
        "temperature": 0.9,
    }
    return TrainStepSpec(**{**values, **changed})


Whole = Mapping[TensorName, tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]]


def warm_state(model: Path) -> Whole:
    """Whole parameters as on disk, with random moments of the size gradients have here."""
    from safetensors.numpy import load_file

    index = model / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    rng = np.random.default_rng(5)
    tensors = {name: array for file in files for name, array in load_file(model / file).items()}
    return {
        TensorName(name): (
            array,
            rng.normal(0, 1e-3, array.shape).astype(np.float32),
            rng.uniform(1e-6, 1e-5, array.shape).astype(np.float32),
        )
        for name, array in sorted(tensors.items())
    }


def update(
    config: TrainingRankConfig, whole: Whole | None, columns: Mapping[str, NDArray[Any]], specs: Sequence[TrainStepSpec]
) -> tuple[TrainStepResult | None, dict[TensorName, TensorState], dict[TensorName, tuple[Box, ...]]]:
    """In a rank process: build, take the boxes of `whole` (None: load from disk), run `specs`, give the last result."""
    from nereus_common.engines.training.torch_native import TorchTrainingEngine

    engine = TorchTrainingEngine(config)
    try:
        if whole is None:
            engine.load(0)
        else:
            cut = {
                name: TensorState(box, *(array[box.slices] for array in whole[name]), step=10)
                for name, (box,) in engine.boxes().items()
            }
            engine.load_state(cut, 0)
        result = None
        for spec in specs:
            result = engine.train_step(spec, columns)
        return result, engine.state(), dict(engine.boxes())
    finally:
        engine.close()


def assemble(states: Sequence[Mapping[TensorName, TensorState]], whole: Whole) -> dict[TensorName, list[NDArray[Any]]]:
    """Whole (parameter, exp_avg, exp_avg_sq, step) from the ranks' parts; copies must agree bit for bit."""
    parts: dict[TensorName, list[NDArray[Any]]] = {
        name: [np.full(arrays[0].shape, np.nan, np.float32) for _ in range(4)] for name, arrays in whole.items()
    }
    for state in states:
        for name, held in state.items():
            values = (held.parameter, held.exp_avg, held.exp_avg_sq, np.float32(held.step))
            for target, value in zip(parts[name], values, strict=True):
                before = target[held.box.slices]
                assert (np.isnan(before) | (before == value)).all(), f"copies of {name} differ"
                target[held.box.slices] = value
    return parts


def import_engines() -> None:
    """In a rank process: pay for imports before anything is waited for."""
    import nereus_common.engines.training.torch_native  # noqa: F401
