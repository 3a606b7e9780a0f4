"""A generation host whose ranks can be told to lose part of the next load."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nereus_common.core.errors import VerificationFailed
from nereus_common.engines.generation import readback
from nereus_common.engines.generation.base import GenerationUnitConfig, RankDigest
from nereus_common.engines.generation.host import GenerationHost
from nereus_common.engines.generation.vllm_engine import VllmEngine
from nereus_common.engines.generation.vllm_transfer import WorkerExtension


def build(config: GenerationUnitConfig) -> VllmEngine:
    return VllmEngine(config, extension="tests.system.bodies.generation_faults:FaultyExtension")


class FaultyHost(GenerationHost):
    """`lose("head")`: the packed copy of a tied head is not renewed; `lose(TEXT)`: tensors with TEXT in their name do
    not reach the loaders; `lose("nothing")`: as it should be."""

    engines: ClassVar = {"vllm": build}

    async def lose(self, what: str) -> bool:
        """Whether there is something to lose: only processors with matrix units have packed copies."""
        assert isinstance(self._engine, VllmEngine)
        return all(await self._engine._call("lose", what))


class FailingHost(GenerationHost):
    """Either engine; after `fail_next` the next install fails before it has touched anything."""

    async def fail_next(self) -> None:
        engine = self._engine
        install = engine.install

        async def fail(version: int, *, timeout: float) -> tuple[RankDigest, ...]:
            engine.install = install  # type: ignore[method-assign]
            raise VerificationFailed(f"version {version} did not arrive")

        engine.install = fail  # type: ignore[method-assign]


class FaultyExtension(WorkerExtension):
    def nereus_dispatch(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method != "lose":
            return WorkerExtension.nereus_dispatch(self, method, arguments)
        (what,) = arguments
        engine: Any = self.weight_transfer_engine
        if what == "head":
            engine.repack_tied_head = lambda: None
            return any(_is_packed(module) for module in engine.model.modules() if isinstance(module, ParallelLMHead))
        elif what == "nothing":
            for name in ("repack_tied_head", "load_tensor"):
                engine.__dict__.pop(name, None)
        else:
            load = engine.load_tensor
            engine.load_tensor = lambda tensor, staging: None if what in tensor else load(tensor, staging)
        return True


@torch.no_grad()
def _is_packed(head: Any) -> bool:
    """Whether it computes with a copy of its table, which then does not follow the table."""
    before = readback.product(head)
    head.weight.mul_(2)
    after = readback.product(head)
    head.weight.div_(2)
    return bool(torch.equal(before, after))
