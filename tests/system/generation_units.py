"""A generation unit in a worker process, and a holder in this one that serves it weights over UCX."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from nereus_generation.unit import OFFLINE, PRELOAD
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from nereus_common.core.ids import DeviceId, TensorName
from nereus_common.core.layout import Layout
from nereus_common.core.plan import Dtypes, GenerationLimits, StagePlan
from nereus_common.core.transfer import Box, RankRef
from nereus_common.engines.generation.base import (
    GenerationRequest,
    GenerationUnitConfig,
    Piece,
    RankDigest,
    RankHolding,
    RankPull,
    WeightOrder,
)
from nereus_common.engines.generation.options import GenerationOptions
from nereus_common.engines.generation.sampling import transform
from nereus_common.state.digest import combine, digest_box
from nereus_common.transport import PullItem, Transport
from nereus_common.workers import Worker, WorkerSpec

HOLDER = RankRef("actor.training.r0", 0)
START_SECONDS = 240.0
CALL_SECONDS = 120.0
PROMPT = tuple(5 + index % 90 for index in range(67))
"""Two full KV blocks of 32 and three tokens."""


def plan(tp: int = 1, dtype: str = "float32", **limits: Any) -> StagePlan:
    chosen = {"max_sequences": 8, "max_batched_tokens": 256, "max_length": 256, "kv_bytes": 32 << 20} | limits
    return StagePlan(
        Layout(tp=tp),
        tuple(DeviceId("node0", f"cpu{rank}") for rank in range(tp)),
        dtypes=Dtypes(compute=dtype, kv=dtype),
        generation=GenerationLimits(**chosen),
    )


@dataclass
class Reference:
    """The Hugging Face model that the unit must agree with, in float32; `bits` are its weights in `dtype`."""

    model: Any
    dtype: torch.dtype
    version: int = 0

    @classmethod
    def load(cls, folder: Path, dtype: str) -> Reference:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        reference = cls(model, getattr(torch, dtype))
        reference.scale(1.0)
        return reference

    def scale(self, factor: float) -> None:
        """Other weights, and a new version of them, exact in `dtype`."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_((parameter * factor).to(self.dtype))
        self.version += 1

    def bits(self) -> dict[TensorName, NDArray[Any]]:
        signed = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        return {
            TensorName(name): tensor.detach().to(self.dtype).view(signed).numpy().view(f"u{self.dtype.itemsize}")
            for name, tensor in self.model.named_parameters()
        }

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self._logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def logprobs(self, request: GenerationRequest, response: Sequence[int]) -> NDArray[np.float64]:
        """Of each token of `response`, after the request's sampling transforms."""
        tokens = [*request.prompt_token_ids, *response]
        rows = self._logits(tokens)[len(request.prompt_token_ids) - 1 : -1]
        shown = transform(rows, request.sampling)
        return shown.gather(-1, torch.tensor(response)[:, None]).squeeze(-1).double().numpy()

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return logits


@dataclass
class Unit:
    worker: Worker
    config: GenerationUnitConfig
    source: Transport
    published: list[Any] = field(default_factory=list)

    @classmethod
    async def start(
        cls,
        folder: Path,
        logs: Path,
        source: Transport,
        *,
        stage: StagePlan,
        engine: str = "vllm",
        body: str = "nereus_common.engines.generation.host:GenerationHost",
        options: GenerationOptions | None = None,
    ) -> Unit:
        config = GenerationUnitConfig(
            "job.actor.generation.e1.r0", folder, stage, logs, engine=engine, options=options or GenerationOptions()
        )
        env = {**OFFLINE, "OMP_NUM_THREADS": "1"}
        spec = WorkerSpec("generation", body, config, logs / "unit.log", env, PRELOAD[engine])
        return cls(await Worker.start(spec, timeout=START_SECONDS), config, source)

    async def call(self, method: str, *args: Any) -> Any:
        return await self.worker.call(method, *args, timeout=CALL_SECONDS)

    async def order(self, reference: Reference, version: int | None = None) -> WeightOrder:
        """Publish the reference's weights, and what every rank must pull of them."""
        version = reference.version if version is None else version
        bits = reference.bits()
        self.published.append(bits)
        self.source.publish(HOLDER, version, {name: [(Box.whole(array.shape), array)] for name, array in bits.items()})
        ranks = cast("tuple[RankHolding, ...]", await self.call("describe"))
        items = tuple(
            tuple(
                PullItem(name, box, HOLDER, self.source.address) for name, boxes in rank.boxes.items() for box in boxes
            )
            for rank in ranks
        )
        return WeightOrder(version, items, str(reference.dtype).removeprefix("torch."), 30.0, f"sync-{version}")

    async def pull(self, reference: Reference, version: int | None = None) -> tuple[RankPull, ...]:
        return cast("tuple[RankPull, ...]", await self.call("pull", await self.order(reference, version)))

    async def sync(self, reference: Reference) -> tuple[RankDigest, ...]:
        """Pull, apply, verify, commit; what each rank computes with."""
        await self.pull(reference)
        digests = await self.call("apply_and_verify", reference.version, CALL_SECONDS)
        await self.call("commit", reference.version)
        return cast("tuple[RankDigest, ...]", digests)

    async def expected(self, reference: Reference) -> list[int]:
        """The digest of each rank's boxes, made from the reference's own weights."""
        bits = reference.bits()
        return [
            combine(
                digest_box(name, bits[name].shape, box, bits[name][box.slices])
                for name, boxes in rank.boxes.items()
                for box in boxes
            )
            for rank in await self.call("describe")
        ]

    def stream(self, request: GenerationRequest, *patience: float) -> aclosing[Any]:
        """To be entered; gives the pieces as they come."""
        return aclosing(cast("Any", self.worker.stream("generate", request, *patience, timeout=CALL_SECONDS)))

    async def pieces(self, request: GenerationRequest, *patience: float) -> list[Piece]:
        async with self.stream(request, *patience) as stream:
            return [piece async for piece in stream]

    async def until(self, **stats: int) -> None:
        """Wait until the unit's counters are these."""
        for _ in range(1200):
            found = await self.call("stats")
            if all(found[name] == value for name, value in stats.items()):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"never {stats}")

    async def samples(self, request: GenerationRequest) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of each sample."""
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(request.samples)]
        for piece in await self.pieces(request):
            found[piece.sample][0].extend(piece.token_ids)
            found[piece.sample][1].extend(piece.logprobs)
        return found
