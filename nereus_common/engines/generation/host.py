"""The body of a generation unit's worker process: one engine, its gate, and the versions it serves.

`nereus_common.workers` builds it on the main thread and runs the async methods in its event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import ClassVar, Protocol

from nereus_common.core.errors import DeadlineExceeded, InvalidInput, NotFound, VerificationFailed
from nereus_common.core.transfer import RankRef
from nereus_common.engines.generation.base import (
    Drain,
    Finish,
    GenerationEngine,
    GenerationRequest,
    GenerationUnitConfig,
    Piece,
    RankDigest,
    RankHolding,
    RankPull,
    WeightOrder,
)
from nereus_common.engines.generation.crossing import Crossing
from nereus_common.engines.generation.gate import Gate
from nereus_common.engines.generation.one_version import OneVersion
from nereus_common.engines.generation.support import check_plan
from nereus_common.transport import PullItem


def _vllm(config: GenerationUnitConfig) -> GenerationEngine:
    from nereus_common.engines.generation.vllm_engine import VllmEngine

    return VllmEngine(config)


def _transformers(config: GenerationUnitConfig) -> GenerationEngine:
    from nereus_common.engines.generation.transformers_engine import TransformersEngine

    return TransformersEngine(config)


ENGINES: Mapping[str, Callable[[GenerationUnitConfig], GenerationEngine]] = {
    "vllm": _vllm,
    "transformers": _transformers,
}


PATIENCE = 3600.0
"""Seconds, where a caller does not say."""


class Run(Protocol):
    """A request under way."""

    def pieces(self) -> AsyncGenerator[Piece]: ...
    async def end(self, cut: Finish) -> None: ...


class GenerationHost:
    """`describe`, `pull`, `apply_and_verify` and `commit` may be repeated for the same version: the answer stays."""

    engines: ClassVar[Mapping[str, Callable[[GenerationUnitConfig], GenerationEngine]]] = ENGINES

    def __init__(self, config: GenerationUnitConfig) -> None:
        check_plan(config.engine, model_config(config), config.plan)
        self._config = config
        self._engine = self.engines[config.engine](config)
        self._gate = Gate(config.unit)
        self._runs: dict[str, Run] = {}
        self._pulled: tuple[int, tuple[RankPull, ...]] | None = None
        self._verified: tuple[int, tuple[RankDigest, ...]] | None = None

    async def describe(self) -> tuple[RankHolding, ...]:
        self._gate.check_awake()
        return await self._engine.describe()

    async def pull(self, order: WeightOrder) -> tuple[RankPull, ...]:
        """Fill staging with a version; whatever is served goes on being served."""
        self._gate.check_awake()
        if self._pulled is None or self._pulled[0] != order.version:
            self._pulled = None
            self._pulled = (order.version, await self._engine.pull(order))
        return self._pulled[1]

    async def load(self, version: int, timeout: float) -> tuple[RankDigest, ...]:
        """Fill from the model folder, each rank reading its own slices, and verify."""
        nobody = RankRef(self._config.unit, 0)
        items = tuple(
            tuple(PullItem(tensor, box, nobody, b"") for tensor, boxes in rank.boxes.items() for box in boxes)
            for rank in await self.describe()
        )
        dtype = self._config.plan.dtypes.compute
        await self.pull(WeightOrder(version, items, dtype, timeout, f"load-{version}", self._config.model_path))
        return await self.apply_and_verify(version, timeout)

    async def apply_and_verify(self, version: int, timeout: float) -> tuple[RankDigest, ...]:
        """Interrupt or wait for the requests in flight, apply what was pulled, tell what every rank then computes with.

        Nothing is served from here until `commit`. VerificationFailed: nor after it.
        """
        if self._verified is not None and self._verified[0] == version and self._gate.applied == version:
            return self._verified[1]
        if self._pulled is None or self._pulled[0] != version:
            raise InvalidInput(f"unit {self._config.unit} has not pulled version {version}", field="version")
        async with self._gate.applying(version, timeout):
            pulled, self._pulled = self._pulled[1], None
            digests = await self._engine.install(version, timeout=timeout)
            _compare(self._config.unit, version, pulled, digests)
        self._verified = (version, digests)
        return digests

    async def commit(self, version: int) -> None:
        """Serve the version."""
        self._gate.commit(version)

    async def version(self) -> int:
        """The version served, -1 when none is."""
        return self._gate.serving

    async def generate(self, request: GenerationRequest, patience: float = PATIENCE) -> AsyncGenerator[Piece]:
        """Stream pieces; closing the stream aborts the request. `patience`: seconds until it stops waiting for a
        version, where it goes across versions."""
        if request.across_versions:
            deadline = asyncio.get_running_loop().time() + patience
            with self._gate.admit_across(request.id, request.version):
                crossing = Crossing(self._gate, self._engine, self._fit(request), deadline)
                async with aclosing(self._run(request.id, crossing)) as pieces:
                    async for piece in pieces:
                        yield piece
        else:
            with self._gate.admit(request.id, request.version) as version:
                one = OneVersion(self._engine, self._fit(request), version)
                async with aclosing(self._run(request.id, one)) as pieces:
                    async for piece in pieces:
                        yield piece

    async def abort(self, request_id: str) -> None:
        """Unknown ids are no error."""
        if request_id in self._runs:
            await self._runs[request_id].end(Finish.ABORT)

    async def drain(self, how: Drain, timeout: float) -> int:
        """Take no more requests, and see to those that are here; how many are left after `timeout` seconds.

        May be called again, also with another `how`.
        """
        self._gate.stop_admitting()
        if how.cut is not None:
            for run in tuple(self._runs.values()):
                await run.end(how.cut)
        return await self._gate.emptied(timeout)

    async def admit_again(self) -> None:
        """Undo a drain: requests are taken again. Those that were cut short stay so."""
        self._gate.admit_again()

    async def sleep(self, timeout: float) -> None:
        """Hand back what is in flight as Drain.RESUME does, then give up KV cache and weights. Idempotent.

        DeadlineExceeded when a request does not end: the unit serves on.
        """
        left = await self.drain(Drain.RESUME, timeout)
        if left:
            self._gate.admit_again()
            raise DeadlineExceeded(
                f"unit {self._config.unit} cannot sleep: {left} requests did not end within {timeout:g} s",
                remedy="drain it first, with more time",
                unit=self._config.unit,
            )
        self._gate.sleep()
        self._pulled = self._verified = None
        await self._engine.sleep()

    async def wake(self) -> None:
        """Start on storage without content: a version must be pulled, verified and committed before any is served."""
        await self._engine.wake()
        self._gate.wake()

    async def stats(self) -> Mapping[str, int]:
        return {
            "active": self._gate.active,
            "parked": self._gate.parked,
            "applied": self._gate.applied,
            "serving": self._gate.serving,
            **self._engine.stats(),
        }

    async def _run(self, request_id: str, run: Run) -> AsyncGenerator[Piece]:
        self._runs[request_id] = run
        try:
            async with aclosing(run.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            del self._runs[request_id]

    def _fit(self, request: GenerationRequest) -> GenerationRequest:
        """The request with max_tokens cut to what the unit's length leaves; InvalidInput where that is nothing."""
        limits = self._config.plan.generation
        room = request.sampling.max_tokens
        if limits is not None:
            room = min(room, limits.max_length - len(request.prompt_token_ids))
        if room < 1:
            raise InvalidInput(
                f"request {request.id} has a prompt of {len(request.prompt_token_ids)} tokens; "
                f"unit {self._config.unit} takes {limits and limits.max_length} with the response",
                remedy="shorten the prompt, or raise generation.max_length in the plan",
                field="prompt_token_ids",
            )
        return replace(request, sampling=replace(request.sampling, max_tokens=room))

    def close(self) -> None:
        self._engine.close()


def model_config(config: GenerationUnitConfig) -> Mapping[str, object]:
    """The model folder's Hugging Face configuration; NotFound names the file that is missing."""
    path = config.model_path / "config.json"
    if not path.is_file():
        raise NotFound(
            f"unit {config.unit}: {path} does not exist", remedy="give a Hugging Face model folder", path=path
        )
    loaded: Mapping[str, object] = json.loads(path.read_text())
    return loaded


def _compare(unit: str, version: int, pulled: tuple[RankPull, ...], read: tuple[RankDigest, ...]) -> None:
    for staged, served in zip(pulled, read, strict=True):
        if staged.digest != served.digest:
            raise VerificationFailed(
                f"rank {served.rank} of unit {unit} was given version {version} with digest {staged.digest:016x} and "
                f"computes with {served.digest:016x}",
                remedy="release the unit and prepare another",
                rank=served.rank,
                version=version,
            )
