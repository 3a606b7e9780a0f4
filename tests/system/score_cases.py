"""Work with score heads: what Hugging Face's sequence classifiers say, and what is done in rank processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from nereus_common.core.ids import Head, TensorName
from nereus_common.core.plan import StagePlan
from nereus_common.core.transfer import Box, RankRef, TransferProgram
from nereus_common.engines.inference.base import InferenceOptions, InferenceRankConfig
from nereus_common.engines.options import Rendezvous
from nereus_common.engines.training.base import TrainingRankConfig
from nereus_common.rl.packing import common_shape, pack_for_ranks
from nereus_common.rl.rollouts import RolloutBatch
from nereus_common.rpc.ports import free_port
from tests.system.training_cases import make_batch

Columns = Mapping[str, NDArray[Any]]
Parts = dict[TensorName, tuple[Box, NDArray[Any]]]
TOKENS = 105
"""The vocabulary of the tiny models."""


def scored_batch() -> RolloutBatch:
    """Groups of responses, some tokens masked, some responses cut at the length limit, one masked as a whole; returns
    are what values should have been."""
    batch = make_batch(groups=4, per_group=3)
    rng = np.random.default_rng(1)
    return batch.with_columns(
        prompt_tokens=batch.prompt_tokens % TOKENS,
        response_tokens=batch.response_tokens % TOKENS,
        finished=rng.random(batch.sequences) < 0.5,
        returns=rng.standard_normal(len(batch.response_tokens)),
    )


def load_classifier(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model


def sequences(batch: RolloutBatch) -> list[tuple[Tensor, int]]:
    """(token ids [1, T], length of the prompt) of each sequence."""
    pairs = [(batch.prompt(int(batch.group[one])), batch.response(one)) for one in range(batch.sequences)]
    return [(torch.as_tensor(np.concatenate(pair))[None].long(), len(pair[0])) for pair in pairs]


def reference_scores(model: Any, batch: RolloutBatch) -> Tensor:
    """[N] the classifier's own output, one sequence at a time."""
    return torch.stack([model(input_ids=ids).logits[0, 0] for ids, _ in sequences(batch)])


def reference_values(model: Any, batch: RolloutBatch) -> Tensor:
    """[R] the head at the row before each response token, one sequence at a time."""
    hidden = ((model.model(input_ids=ids).last_hidden_state[0], prompt) for ids, prompt in sequences(batch))
    return torch.cat([model.score(rows[prompt - 1 : -1])[:, 0] for rows, prompt in hidden])


def reference_gradients(folder: Path, batch: RolloutBatch) -> dict[TensorName, NDArray[Any]]:
    """Of half the squared error of unmasked values, by name."""
    model = load_classifier(folder)
    error = reference_values(model, batch) - torch.as_tensor(batch.returns).double()
    (torch.as_tensor(batch.mask) * error.square()).sum().mul(0.5).backward()  # type: ignore[no-untyped-call]
    named = {TensorName(name): parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.numpy() for name, grad in named.items() if grad is not None}


def scorer_ranks(model: Path, plan: StagePlan, *, shared: bool = True, head: Head = Head.SCORE) -> list[Any]:
    meet, options = Rendezvous("127.0.0.1", free_port(), "score"), InferenceOptions(shared, threads=1)
    config = InferenceRankConfig("scorer", str(model), plan, 0, meet, options, "loopback", 20.0, head)
    return [replace(config, rank=rank) for rank in range(plan.layout.ranks)]


def score(config: InferenceRankConfig, columns: Columns, works: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """In a rank process: load from the folder and do every work."""
    from nereus_common.engines.inference.torch_native import TorchInferenceEngine

    engine = TorchInferenceEngine(config)
    try:
        engine.load(0)
        return {name: column for work in works for name, column in engine.score(columns, work, 0.3).items()}
    finally:
        engine.close()


def gradients(config: TrainingRankConfig, columns: Columns, new_head: bool) -> tuple[Parts, Parts, Parts]:
    """In a rank process: parameters as loaded, in float32 and on the wire in bfloat16, and gradients as in
    `reference_gradients`."""
    from nereus_common.engines.torch_model.build import TORCH_DTYPES, build_stage
    from nereus_common.engines.torch_model.checkpoint import load_shards
    from nereus_common.engines.torch_model.packs import to_tensors
    from nereus_common.engines.torch_model.shards import shards
    from nereus_common.engines.torch_model.wire import to_bits
    from nereus_common.engines.torch_model.world import open_world
    from nereus_common.engines.training.gradients import collect_gradients
    from nereus_common.engines.training.microbatches import accumulate_gradients

    plan, batch, cpu = config.stage, RolloutBatch.from_columns(columns), torch.device("cpu")
    world = open_world(config.rendezvous, plan.layout, plan.replicas, config.replica, config.rank, 20.0, "cpu")
    try:
        model = build_stage(config.model_path, plan, world, cpu, train=True, head=Head.SCORE)
        held = shards(model)
        load_shards(Path(config.model_path), held, new_head=new_head)
        layout = plan.layout
        share = pack_for_ranks(batch, layout.fs, plan.microbatch_tokens, wanted=batch.mask, at_least=layout.pp)
        shape = common_shape(share[world.place.fs])
        compute = TORCH_DTYPES[plan.dtypes.compute]
        packs = [to_tensors(pack.padded(*shape), cpu, compute) for pack in share[world.place.fs]]

        def loss_of(index: int, values: Tensor) -> Tensor:
            source = packs[index].source
            real = torch.as_tensor(source >= 0)
            wanted = torch.as_tensor(batch.returns)[source.clamp(min=0)]
            assert values.shape == (1, model.output_rows, len(source)) and values.dtype == torch.float32
            return 0.5 * ((values[0, 0] - wanted).square() * real).sum()

        accumulate_gradients(model, packs, loss_of, compute)
        found = collect_gradients(model, held)
        filled = [(shard, grad) for shard, grad in zip(held, found, strict=True) if shard.box.elements]
        return (
            {shard.name: (shard.box, shard.local.numpy().copy()) for shard, _ in filled},
            {shard.name: (shard.box, to_bits(shard.local, "bfloat16")) for shard, _ in filled},
            {shard.name: (shard.box, grad.numpy().copy()) for shard, grad in filled},
        )
    finally:
        world.close()


def receive_and_score(
    config: InferenceRankConfig,
    program: TransferProgram,
    sources: Mapping[RankRef, Parts],
    columns: Columns,
) -> tuple[dict[str, NDArray[np.float32]], int]:
    """In a rank process: carry out the transfers to this rank, serve them, score; and the digest of what is served."""
    from nereus_common.engines.inference.torch_native import TorchInferenceEngine

    engine = TorchInferenceEngine(config)
    try:
        staging = engine.stage(1, "bfloat16")
        for move in program.for_target(RankRef(config.unit, config.rank)):
            box, array = sources[move.source][move.tensor]
            staging.put(move.tensor, move.box, np.ascontiguousarray(array[move.box.relative_to(box).slices]))
        engine.apply(staging)
        return dict(engine.score(columns, "values", 1.0)), engine.digest("bfloat16")
    finally:
        engine.close()


def whole(parts: Sequence[Parts]) -> dict[TensorName, NDArray[Any]]:
    """Tensors put together from ranks' parts: copies must agree, and nothing be missing."""
    found: dict[TensorName, NDArray[Any]] = {}
    for name in {name for part in parts for name in part}:
        boxes = [part[name] for part in parts if name in part]
        size = tuple(max(box.stop[axis] for box, _ in boxes) for axis in range(len(boxes[0][0].stop)))
        found[name] = np.full(size, np.nan, np.float32)
        for box, array in boxes:
            before = found[name][box.slices]
            assert (np.isnan(before) | np.isclose(before, array, rtol=1e-5, atol=1e-7)).all(), (
                f"copies of {name} differ"
            )
            found[name][box.slices] = array
        assert not np.isnan(found[name]).any(), name
    return found
