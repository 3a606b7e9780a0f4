"""Hugging Face modules in one process, behind the same interface: for tests that cannot afford an engine start.

Requests take turns, one token each; the samples of one request go in lock-step over one KV cache.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import torch

from nereus_common.core.errors import IllegalTransition, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.core.transfer import Box
from nereus_common.engines.generation import readback
from nereus_common.engines.generation.base import (
    Delta,
    Finish,
    GenerationEngine,
    GenerationRequest,
    GenerationUnitConfig,
    RankDigest,
    RankHolding,
    RankPull,
    WeightOrder,
)
from nereus_common.engines.generation.sampling import sample
from nereus_common.engines.generation.staging import Staging, check_cover, stage
from nereus_common.engines.torch_model.memory import give_back
from nereus_common.engines.torch_model.vector_math import settle_vector_math
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport import open_transport


class TransformersEngine(GenerationEngine):
    def __init__(self, config: GenerationUnitConfig) -> None:
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.plan.dtypes.compute)
        self._model: Any = None
        settle_vector_math()
        self._parameters: dict[TensorName, torch.Tensor] = {}
        self._build()
        self._boxes = {name: (Box.whole(tuple(tensor.shape)),) for name, tensor in self._parameters.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        self._generator = torch.Generator().manual_seed(config.seed)
        self._transport = open_transport(config.transport)
        self._staging: Staging | None = None
        self._running: dict[str, bool] = {}
        """Requests under way; True: asked to end."""
        self._turn = asyncio.Lock()

    async def describe(self) -> tuple[RankHolding, ...]:
        return (RankHolding(0, self._transport.address, self._boxes),)

    async def pull(self, order: WeightOrder) -> tuple[RankPull, ...]:
        offered = itertools.groupby(sorted(order.items[0], key=lambda item: item.tensor), key=lambda item: item.tensor)
        check_cover(self._boxes, {tensor: tuple(item.box for item in items) for tensor, items in offered})
        self._staging = None
        return (await asyncio.to_thread(self._pull, order),)

    async def install(self, version: int, *, timeout: float) -> tuple[RankDigest, ...]:
        staging, self._staging = self._staging, None
        if staging is None or staging.version != version:
            raise IllegalTransition(f"version {version} is not staged", remedy="pull it first")
        with torch.no_grad():
            for tensor, parameter in self._parameters.items():
                for box, array in staging.boxes(tensor):
                    parameter[box.slices] = torch.from_numpy(array).view(self._dtype)
        digests = {name: self._read(name) for name in self._parameters}
        expected = staging.digests()
        wrong = [name for name, digest in digests.items() if digest != expected[name]]
        if wrong:
            raise VerificationFailed(f"version {version} did not reach {wrong[0]}", tensors=",".join(wrong))
        return (RankDigest(0, combine(digests.values())),)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        state = _Decoding(self._model, request, self._generator)
        self._running[request.id] = False
        try:
            while state.growing and not self._running[request.id]:
                async with self._turn:
                    deltas = await asyncio.to_thread(state.step)
                for delta in deltas:
                    yield delta
            for index in state.growing:
                yield Delta(index, (), (), Finish.ABORT)
        finally:
            del self._running[request.id]

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id] = True

    async def sleep(self) -> None:
        self._model, self._parameters, self._staging = None, {}, None
        give_back(torch.device("cpu"))

    async def wake(self) -> None:
        if self._model is None:
            await asyncio.to_thread(self._build)

    def stats(self) -> Mapping[str, int]:
        return {"pid.engine": os.getpid(), "cached_tokens": 0}

    def close(self) -> None:
        self._transport.close()

    def _build(self) -> None:
        """The model with weights of no meaning."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._config.model_path))
        self._model.to(self._dtype).eval()
        self._parameters = {TensorName(name): tensor for name, tensor in self._model.named_parameters()}

    def _pull(self, order: WeightOrder) -> RankPull:
        staging = Staging(order.version, order.wire_dtype, self._shapes, self._boxes)
        report = stage(staging, order, 0, self._transport)
        self._staging = staging
        return report

    def _read(self, tensor: TensorName) -> int:
        (box,) = self._boxes[tensor]
        return digest_box(tensor, self._shapes[tensor], box, readback.bits(self._parameters[tensor], self._dtype))


class _Decoding:
    """One request under way. `growing`: indexes of the samples that have not ended; their rows, in that order."""

    def __init__(self, model: Any, request: GenerationRequest, generator: torch.Generator) -> None:
        self._model = model
        self._request = request
        self._generator = generator
        self._cache: Any = None
        self._input = torch.tensor([request.prompt_token_ids] * request.samples)
        self._count = 0
        self.growing = list(range(request.samples))

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Sample one token of every growing sample."""
        output = self._model(self._input, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        tokens, logprobs = sample(output.logits[:, -1], self._request.sampling, self._generator)
        self._count += 1
        deltas = [
            Delta(index, (token,), (logprob,), self._finish(token))
            for index, token, logprob in zip(self.growing, tokens.tolist(), logprobs.tolist(), strict=True)
        ]
        kept = [row for row, delta in enumerate(deltas) if delta.finish is None]
        if kept and len(kept) < len(self.growing):
            self._cache.batch_select_indices(torch.tensor(kept))
        self._input = tokens[kept, None]
        self.growing = [self.growing[row] for row in kept]
        return deltas

    def _finish(self, token: int) -> Finish | None:
        if token in self._request.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self._count == self._request.sampling.max_tokens else None
