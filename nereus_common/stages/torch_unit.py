"""What units of torch ranks have in common: a process per rank, and a state that moves as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nereus_common.core.errors import IllegalTransition, ProcessLost
from nereus_common.core.ids import TensorName
from nereus_common.stages.base import Holding, HostSettings, StateCopies, UnitSpec
from nereus_common.stages.cores import KEEP_MEMORY
from nereus_common.stages.ranks import holding_of, summed
from nereus_common.stages.worker_set import WorkerSet
from nereus_common.workers import WorkerSpec


class TorchUnit:
    """The calls of UnitHost that are the same for training and inference. `configs`: what each rank's worker, of class
    `body` ("module:name"), is made from. `on_lost` hears of a process that ended unasked."""

    def __init__(
        self,
        spec: UnitSpec,
        body: str,
        configs: Sequence[Any],
        settings: HostSettings,
        on_lost: Callable[[ProcessLost], None],
    ) -> None:
        self._spec = spec
        self._devices = spec.plan.unit_devices(spec.replica)
        self._workers = WorkerSet(
            [_worker(f"{spec.unit}.{rank}", body, config, settings) for rank, config in enumerate(configs)], on_lost
        )

    @property
    def copies(self) -> StateCopies | None:
        return None

    @property
    def pids(self) -> Sequence[int]:
        return self._workers.pids

    async def prepare(self, timeout: float) -> None:
        await self._workers.start(timeout)

    async def offer(self, version: int, timeout: float) -> Holding:
        found = await self._workers.call_each("offer", version, timeout / 2, timeout=timeout)
        return holding_of(version, self._devices, found)

    async def withdraw(self, timeout: float) -> None:
        await self._workers.call_each("withdraw", timeout / 2, timeout=timeout)

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        """Readers are waited for twice: before the tensors are freed, and before the others are offered again."""
        await self._workers.call_each("drop", list(tensors), timeout / 4, timeout=timeout)

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        """By "parameters", and when it trains "exp_avg", "exp_avg_sq" and "step". StaleVersion when any rank holds
        another version."""
        return summed(await self._workers.call_each("digest_state", version, timeout=timeout))

    async def sleep(self, timeout: float) -> None:
        raise self._stays()

    async def wake(self, timeout: float) -> None:
        raise self._stays()

    async def release(self) -> None:
        await self._workers.stop()

    async def release_ranks(self) -> None:
        await self._workers.stop()

    def _stays(self) -> IllegalTransition:
        name = self._spec.model_stage.stage
        return IllegalTransition(f"unit {self._spec.unit}: {name} units stay on their devices", unit=self._spec.unit)


def _worker(name: str, body: str, config: Any, settings: HostSettings) -> WorkerSpec:
    preload = (body.partition(":")[0],)
    return WorkerSpec(name, body, config, settings.log_dir / f"{name}.log", KEEP_MEMORY, preload)
