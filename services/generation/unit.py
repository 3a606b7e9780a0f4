"""A generation unit: one engine host process, which owns the engine's own processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from nereus_common.core.errors import ProcessLost, VerificationFailed
from nereus_common.engines.generation.base import Drain, GenerationRequest, GenerationUnitConfig, Piece, WeightOrder
from nereus_common.engines.generation.options import GenerationOptions
from nereus_common.stages.base import Holding, HostSettings, OffersNothing, PullOrder, RankHolding, RankPulled, UnitSpec
from nereus_common.stages.worker_set import WorkerSet
from nereus_common.transport import PullItem
from nereus_common.workers import WorkerSpec

BODY = "nereus_common.engines.generation.host:GenerationHost"
DEFAULT_ENGINE = "vllm"
HOST = BODY.partition(":")[0]
PRELOAD = {
    "vllm": (
        HOST,
        "nereus_common.engines.generation.vllm_engine",
        "vllm.v1.engine.async_llm",
        "vllm.engine.arg_utils",
    ),
    "transformers": (
        HOST,
        "nereus_common.engines.generation.transformers_engine",
        "transformers.models.auto.modeling_auto",
    ),
}
"""By engine. On CPUs vLLM starts the processes below its host anew, whatever that has imported."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Read when it is imported: models are folders."""
ANSWER_SECONDS = 1.0
"""By which a request that waits for a version gives up before its caller does, who then hears what it waited for."""


class GenerationUnit(OffersNothing):
    """UnitHost over one engine host. `on_lost` hears of a process that ended unasked."""

    def __init__(self, spec: UnitSpec, settings: HostSettings, on_lost: Callable[[ProcessLost], None]) -> None:
        self._spec = spec
        self._devices = spec.plan.unit_devices(spec.replica)
        config = GenerationUnitConfig(
            unit=spec.unit,
            model_path=Path(spec.model_path),
            plan=spec.plan,
            log_dir=settings.log_dir,
            replica=spec.replica,
            seed=spec.seed + spec.replica,
            engine=spec.engine or DEFAULT_ENGINE,
            transport=settings.transport,
            options=GenerationOptions.from_mapping(spec.options),
        )
        log_path = settings.log_dir / f"{spec.unit}.log"
        worker = WorkerSpec(spec.unit, BODY, config, log_path, OFFLINE, PRELOAD.get(config.engine, ()))
        self._workers = WorkerSet([worker], on_lost)

    @property
    def pids(self) -> Sequence[int]:
        return self._workers.pids

    async def prepare(self, timeout: float) -> None:
        await self._workers.start(timeout)

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        """Fill from the model folder: for a model that nobody trains."""
        await self._workers.call_each("load", version, timeout, timeout=timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        (ranks,) = await self._workers.call_each("describe", timeout=timeout)
        return Holding(
            version=-1,
            ranks=tuple(
                RankHolding(rank.rank, str(self._devices[rank.rank]), rank.address, rank.boxes) for rank in ranks
            ),
        )

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        if order.state:
            raise self._refused("takes its weights by weight sync only")
        items = tuple(
            tuple(
                PullItem(move.tensor, move.box, move.source, order.addresses[move.source])
                for move in order.transfers
                if move.target.rank == rank
            )
            for rank in range(len(self._devices))
        )
        weights = WeightOrder(order.version, items, order.wire_dtype, order.timeout, order.transition)
        (pulled,) = await self._workers.call_each("pull", weights, timeout=order.timeout)
        return [RankPulled(rank.rank, rank.bytes, rank.seconds, rank.digest) for rank in pulled]

    async def verify(self, version: int, wire_dtype: str, timeout: float) -> Mapping[int, int]:
        (digests,) = await self._workers.call_each("apply_and_verify", version, timeout, timeout=timeout)
        found = {rank.rank: rank.digest for rank in digests}
        if sorted(found) != list(range(len(self._devices))):
            raise VerificationFailed(f"unit {self._spec.unit}: ranks {sorted(found)} answered", unit=self._spec.unit)
        return found

    async def commit(self, version: int, timeout: float) -> None:
        await self._workers.call_each("commit", version, timeout=timeout)

    async def sleep(self, timeout: float) -> None:
        """Requests in flight are handed back; KV cache and weights are free afterwards. Nothing to undo on an error."""
        await self._workers.call_each("sleep", timeout / 2, timeout=timeout)

    async def wake(self, timeout: float) -> None:
        await self._workers.call_each("wake", timeout=timeout)

    async def release(self) -> None:
        await self._workers.stop()

    def generate(self, request: GenerationRequest, timeout: float) -> AsyncIterator[Piece]:
        """Pieces as they come; closing the iterator aborts the request."""
        (worker,) = self._workers.workers
        patience = max(timeout - ANSWER_SECONDS, timeout / 2)
        return worker.stream("generate", request, patience, timeout=timeout)

    async def drain(self, how: Drain, timeout: float) -> int:
        """Take no more requests and see to those in flight; how many are left after `timeout` seconds."""
        (left,) = await self._workers.call_each("drain", how, timeout, timeout=timeout + ANSWER_SECONDS)
        return int(left)

    async def admit_again(self, timeout: float) -> None:
        """Undo a drain."""
        await self._workers.call_each("admit_again", timeout=timeout)

    async def abort(self, request_id: str, timeout: float) -> None:
        await self._workers.call_each("abort", request_id, timeout=timeout)
