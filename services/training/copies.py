"""Copies of a training unit's state, beside the processes that train: what is left of the unit when those are lost."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nereus_common.core.errors import ProcessLost
from nereus_common.core.ids import TensorName
from nereus_common.engines.torch_model.answers import RankHolding
from nereus_common.engines.training.mirror import MirrorConfig, MirroredTensor
from nereus_common.stages.base import Holding, HostSettings, UnitSpec
from nereus_common.stages.ranks import holding_of, summed
from nereus_common.stages.worker_set import WorkerSet
from nereus_common.workers import WorkerSpec

log = logging.getLogger(__name__)

BODY = "nereus_common.engines.training.mirror:MirrorWorker"
PRELOAD = (BODY.partition(":")[0],)


class Mirrors:
    """A process per rank, on the device of the next one. They do not end with the ranks; when one of them is lost, all
    are made anew at the next version."""

    def __init__(self, spec: UnitSpec, settings: HostSettings) -> None:
        devices = spec.plan.unit_devices(spec.replica)
        self._unit = spec.unit
        self._devices = (*devices[1:], devices[0])
        self._specs = [
            WorkerSpec(
                f"{spec.unit}.{rank}.mirror",
                BODY,
                MirrorConfig(spec.unit, rank, settings.transport),
                settings.log_dir / f"{spec.unit}.{rank}.mirror.log",
                preload=PRELOAD,
            )
            for rank in range(len(devices))
        ]
        self._set: WorkerSet | None = None
        self._whole = self._told = False
        self._tensors: list[Mapping[TensorName, MirroredTensor]] = []
        """By rank; the same for as long as the unit lives."""

    async def start(self, timeout: float) -> None:
        """Start all, unless all are there."""
        if not self._whole:
            await self.stop()
            self._set = WorkerSet(self._specs, self._lost)
            await self._set.start(timeout)
            self._whole, self._told = True, False

    async def copy(self, version: int, ranks: WorkerSet, timeout: float) -> None:
        """Copy what `ranks` hold. They offer it meanwhile, and nothing else.

        When a mirror is lost the unit goes on without copies until the next version; when a rank is, it is ProcessLost.
        """
        offers: list[RankHolding] = await ranks.call_each("offer", version, timeout / 4, timeout=timeout)
        if not self._tensors:
            self._tensors = await ranks.call_each("mirrored", timeout=timeout)
        given = [(version, offer.address, f"{self._unit}.mirror.v{version}", timeout / 4) for offer in offers]
        try:
            await self.start(timeout)
            if not self._told:
                await self._there().call_all("keep", [(held,) for held in self._tensors], timeout)
                self._told = True
            await self._there().call_all("copy", given, timeout)
        except ProcessLost as lost:
            self._lost(lost)
        await ranks.call_each("withdraw", timeout / 4, timeout=timeout)

    async def offer(self, version: int, timeout: float) -> Holding:
        """Serve `version` in the ranks' stead. ProcessLost where no copies are; StaleVersion for another version."""
        return holding_of(version, self._devices, await self._there().call_each("offer", version, timeout=timeout))

    async def digest(self, version: int, timeout: float) -> Mapping[str, int]:
        """As `TorchUnit.digest`."""
        return summed(await self._there().call_each("digest_state", version, timeout=timeout))

    async def stop(self) -> None:
        self._whole, mirrors, self._set = False, self._set, None
        if mirrors is not None:
            await mirrors.stop()

    def _there(self) -> WorkerSet:
        if self._set is None or not self._whole:
            raise ProcessLost(f"unit {self._unit} has no copies: a process that kept some was lost", unit=self._unit)
        return self._set

    def _lost(self, lost: ProcessLost) -> None:
        log.warning("unit %s has no copies until its next version: %s", self._unit, lost)
        self._whole = False
