"""One process per device, started once; a unit's ranks run in those of its devices, for as long as it lives.

Starting a rank takes seconds, nearly all of them imports. What a rank does after them is the same as in a process of
its own: the bodies, engines, groups and transports are those of the stage services.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_common.core.ids import DeviceId
from nereus_common.stages.cores import KEEP_MEMORY
from nereus_common.stages.worker_set import WorkerSet
from nereus_common.workers import Worker, WorkerSpec

BODY = "benchmarks.device_rank:DeviceRank"
START_SECONDS = 300.0
STOP_SECONDS = 60.0


class DeviceProcesses:
    """`pause`: a rank starts after up to so many seconds, drawn from `rng`."""

    def __init__(self, devices: Sequence[DeviceId], logs: Path, rng: random.Random, pause: float) -> None:
        specs = [
            WorkerSpec(str(device), BODY, str(device), logs / f"{device.slot}.log", KEEP_MEMORY) for device in devices
        ]
        self._places = {device: place for place, device in enumerate(devices)}
        self._set = WorkerSet(specs, lambda lost: None)  # whoever calls it next hears of a loss
        self._rng, self._pause = rng, pause

    async def start(self) -> None:
        await self._set.start(START_SECONDS)

    async def stop(self) -> None:
        await self._set.stop()

    def __getitem__(self, device: DeviceId) -> Worker:
        return self._set.workers[self._places[device]]

    async def launch(self, device: DeviceId, spec: WorkerSpec, timeout: float) -> frozenset[str]:
        await asyncio.sleep(self._rng.uniform(0, self._pause))
        opened: frozenset[str] = await self[device].call("open", spec.body, spec.config, timeout=timeout)
        return opened


class DeviceWorkers:
    """The calls of a `WorkerSet`, answered by the processes of the unit's devices. They outlive the unit."""

    def __init__(self, processes: DeviceProcesses, ranks: Mapping[DeviceId, WorkerSpec]) -> None:
        self._processes, self._ranks = processes, ranks
        self._is_async: frozenset[str] = frozenset()
        self._begun = False

    @property
    def pids(self) -> Sequence[int]:
        return [self._processes[device].pid for device in self._ranks]

    async def start(self, timeout: float) -> None:
        self._begun = True
        launches = (self._processes.launch(device, spec, timeout) for device, spec in self._ranks.items())
        self._is_async, *_ = await asyncio.gather(*launches)

    async def call_all(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        door = "call_async" if method in self._is_async else "call"
        return await asyncio.gather(
            *(
                self._processes[device].call(door, method, given, timeout=timeout)
                for device, given in zip(self._ranks, arguments, strict=True)
            )
        )

    async def call_each(self, method: str, *given: Any, timeout: float) -> list[Any]:
        return await self.call_all(method, [given] * len(self._ranks), timeout)

    async def stop(self) -> None:
        if self._begun:
            self._begun = False
            await asyncio.gather(
                *(self._processes[device].call("shut", timeout=STOP_SECONDS) for device in self._ranks)
            )
