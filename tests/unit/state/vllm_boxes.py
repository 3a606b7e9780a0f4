"""What vLLM's own weight loaders take, rank by rank: a program that reads cases as JSON and prints boxes as JSON.

A rank is played by standing in for the process groups, which the loaders ask for nothing but size and rank. The model
has no storage ("meta"): each copy that a loader makes is recorded, and the source view's offset and shape in the
checkpoint tensor are the box.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

Boxes = dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]]


class RecordCopies(TorchDispatchMode):
    """Collects, per checkpoint tensor, the boxes that are copied out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ("", torch.empty(0))
        self.taken: Boxes = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, tensor = self.current
        if func is torch.ops.aten.copy_.default and name:
            source = args[1]
            offset, start = source.storage_offset(), []
            for stride in tensor.stride():
                start.append(offset // stride)
                offset %= stride
            shape = (1,) * (tensor.dim() - source.dim()) + tuple(source.shape)
            if math.prod(shape):
                stop = tuple(a + size for a, size in zip(start, shape, strict=True))
                self.taken[name].add((tuple(start), stop))
        return func(*args, **(kwargs or {}))


@contextmanager
def played_rank(rank: int, tp: int, pp: int) -> Iterator[None]:
    import vllm.distributed.parallel_state as groups

    def group(index: int, size: int) -> Any:
        return SimpleNamespace(
            world_size=size,
            rank_in_group=index,
            is_first_rank=index == 0,
            is_last_rank=index == size - 1,
            rank=rank,
        )

    names = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP")
    before = {name: getattr(groups, name, None) for name in names}
    for name in names:
        setattr(groups, name, group(0, 1))
    groups._TP, groups._PP = group(rank % tp, tp), group(rank // tp, pp)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(groups, name, value)


def taken_boxes(config: dict[str, Any], tp: int, pp: int, folder: Path) -> list[Boxes]:
    """Per rank, the boxes of every checkpoint tensor that vLLM loads there."""
    from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    hf = transformers.AutoConfig.for_model(**config)
    hf.architectures = [type(transformers.AutoModelForCausalLM.from_config(hf)).__name__]
    hf.save_pretrained(folder)
    with torch.device("meta"):
        checkpoint = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16)
    model_config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")
    result = []
    for rank in range(tp * pp):
        vllm_config = VllmConfig(
            model_config=model_config, cache_config=CacheConfig(), load_config=LoadConfig(load_format="dummy")
        )
        with played_rank(rank, tp, pp), set_current_vllm_config(vllm_config):
            with torch.device("meta"):
                model = initialize_model(vllm_config)
            result.append(_load(model, dict(checkpoint.named_parameters())))
    return result


def _load(model: Any, parameters: dict[str, Any]) -> Boxes:
    recorder = RecordCopies()

    def stream() -> Iterator[tuple[str, Any]]:
        for name, parameter in parameters.items():
            recorder.current = (name, parameter.data)
            yield name, parameter.data

    with recorder:
        model.load_weights(stream())
    return recorder.taken


def main() -> None:
    cases = json.loads(sys.argv[1])
    answers = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            ranks = taken_boxes(case["config"], case["tp"], case["pp"], Path(folder))
        answers.append([{name: sorted(boxes) for name, boxes in rank.items()} for rank in ranks])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
