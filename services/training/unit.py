"""A training unit: one worker process per rank; the ranks of all replicas meet in one group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nereus_common.checkpoints.manifest import read_manifest
from nereus_common.checkpoints.state import Digests
from nereus_common.core.errors import IllegalTransition, InvalidInput, ProcessLost, VerificationFailed
from nereus_common.core.ids import TensorName
from nereus_common.engines import options as engine_options
from nereus_common.engines.training.base import TrainingOptions, TrainingRankConfig, TrainStepResult, TrainStepSpec
from nereus_common.rpc.together import together
from nereus_common.stages.base import Holding, HostSettings, PullOrder, RankPulled, UnitSpec
from nereus_common.stages.cores import cores_per_rank
from nereus_common.stages.ranks import holding_of, request_of
from nereus_common.stages.torch_unit import TorchUnit

from .copies import Mirrors

BODY = "nereus_common.engines.training.worker:TrainingWorker"


class TrainingUnit(TorchUnit):
    """UnitHost over one process per rank. `on_lost` hears of a process that ended unasked."""

    def __init__(self, spec: UnitSpec, settings: HostSettings, on_lost: Callable[[ProcessLost], None]) -> None:
        configs = [_config(spec, rank, settings) for rank in range(spec.plan.layout.ranks)]
        super().__init__(spec, BODY, configs, settings, on_lost)
        self._mirrors = Mirrors(spec, settings) if _options(spec).redundancy else None
        self._version = self._published = -1
        self._last: tuple[int, TrainStepResult] | None = None

    @property
    def copies(self) -> Mirrors | None:
        return self._mirrors

    async def prepare(self, timeout: float) -> None:
        starts = [self._workers.start(timeout)]
        if self._mirrors is not None:
            starts.append(self._mirrors.start(timeout))
        await together(starts)

    async def load(self, version: int, timeout: float, checkpoint: str = "") -> None:
        if checkpoint:
            await self._restore(version, Path(checkpoint), timeout)
        else:
            await self._workers.call_each("load", version, timeout=timeout)
        self._version = version
        await self._copy(version, timeout)
        await self._publish(version, timeout, timeout)

    async def describe(self, timeout: float, state: bool = False) -> Holding:
        found = await self._workers.call_each("describe", state, timeout=timeout)
        return holding_of(self._version, self._devices, found)

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        """Whole states only, straight into their place: a trained model's versions come from its own updates."""
        if not order.state:
            raise IllegalTransition(
                f"unit {self._spec.unit} trains: it is the source of its model's versions and pulls none",
                remedy="pull its whole state, from the offer of another unit",
                unit=self._spec.unit,
            )
        requests = [(request_of(order, rank), order.more) for rank in range(len(self._devices))]
        pulled = await self._workers.call_all("pull_state", requests, order.timeout)
        if not order.more:
            self._version, self._last = order.version, None
        return [RankPulled(one.rank, one.bytes, one.seconds, one.digest) for one in pulled]

    async def verify(self, version: int, wire_dtype: str, timeout: float) -> Mapping[int, int]:
        return dict(enumerate(await self._workers.call_each("verify", wire_dtype, timeout=timeout)))

    async def commit(self, version: int, timeout: float) -> None:
        """Publish the version, unless it is: of a state that was pulled nothing was."""
        if version != self._version:
            raise IllegalTransition(f"unit {self._spec.unit} holds version {self._version}, not {version}")
        if self._published != version:
            await self._copy(version, timeout)
            await self._publish(version, timeout, timeout)

    async def offer(self, version: int, timeout: float) -> Holding:
        self._published = -1
        return await super().offer(version, timeout)

    async def withdraw(self, timeout: float) -> None:
        await super().withdraw(timeout)
        await self._publish(self._version, timeout, timeout)

    async def drop(self, tensors: Sequence[TensorName], timeout: float) -> None:
        self._version = self._published = -1
        await super().drop(tensors, timeout)

    async def release(self) -> None:
        await super().release()
        if self._mirrors is not None:
            await self._mirrors.stop()

    async def take_snapshot(self, version: int, timeout: float) -> None:
        """Copy the state aside on every rank. StaleVersion when the unit holds another version. Idempotent."""
        await self._workers.call_each("take_snapshot", version, timeout=timeout)

    async def write_snapshot(self, version: int, folder: str, timeout: float) -> Sequence[str]:
        """Write the copies into `folder`, beside training; what each rank wrote, as JSON. Idempotent."""
        written: list[str] = await self._workers.call_each("write_snapshot", version, folder, timeout=timeout)
        return written

    async def train(
        self, update: TrainStepSpec, columns: Mapping[str, NDArray[Any]], *, pin_timeout: float, timeout: float
    ) -> TrainStepResult:
        """One update on all ranks, then the new version is offered. The same step again returns the first result.

        Pulls of the old version may go on for `pin_timeout` seconds; then they are revoked.
        """
        if self._last is not None and self._last[0] == update.step:
            return self._last[1]
        if update.step != self._version:
            raise IllegalTransition(
                f"unit {self._spec.unit} holds version {self._version}; step {update.step} starts from {update.step}",
                unit=self._spec.unit,
            )
        results: list[TrainStepResult] = await self._workers.call_each("train_step", update, columns, timeout=timeout)
        started = time.monotonic()
        await self._copy(results[0].version, timeout)
        copied = time.monotonic()
        await self._publish(results[0].version, pin_timeout, timeout)
        slowest = max(results, key=lambda one: sum(one.seconds.values()))
        result = TrainStepResult(
            version=results[0].version,
            metrics=results[0].metrics,
            seconds={**slowest.seconds, "copy": copied - started, "publish": time.monotonic() - copied},
            peak_memory_bytes=max(one.peak_memory_bytes for one in results),
        )
        self._version = result.version
        self._last = (update.step, result)
        return result

    async def _copy(self, version: int, timeout: float) -> None:
        """Before anybody is told of the version, so that whoever knows of it can count on its copies."""
        if self._mirrors is not None:
            await self._mirrors.copy(version, self._workers, timeout)

    async def _publish(self, version: int, pin_timeout: float, timeout: float) -> None:
        """Let weight syncs pull the version from now on."""
        await self._workers.call_each("publish", version, pin_timeout, timeout=timeout)
        self._published = version

    async def _restore(self, version: int, checkpoint: Path, timeout: float) -> None:
        """Every rank reads its boxes; together they must hold what was saved."""
        model = self._spec.model_stage.model
        manifest = await asyncio.to_thread(read_manifest, checkpoint)
        saved = manifest.model(model).digests
        if manifest.version != version:
            raise InvalidInput(
                f"{checkpoint} holds version {manifest.version}, not {version}",
                remedy="load it as the version it is",
                field="version",
            )
        parts: list[Digests] = await self._workers.call_each(
            "restore", version, str(checkpoint), model, timeout=timeout
        )
        if wrong := Digests.sum(parts).differing(saved):
            raise VerificationFailed(
                f"unit {self._spec.unit}: {', '.join(wrong)} of {model} are not what {checkpoint} was made of",
                remedy="the checkpoint is damaged: use another one",
                unit=self._spec.unit,
                model=model,
            )


def _config(spec: UnitSpec, rank: int, settings: HostSettings) -> TrainingRankConfig:
    meeting = spec.rendezvous
    return TrainingRankConfig(
        unit=spec.unit,
        model_path=spec.model_path,
        stage=spec.plan,
        replica=spec.replica,
        rank=rank,
        rendezvous=engine_options.Rendezvous(meeting.host, meeting.port, meeting.prefix),
        options=_options(spec),
        seed=spec.seed,
        head=spec.head,
        transport=settings.transport,
    )


def _options(spec: UnitSpec) -> TrainingOptions:
    """The job's options; unless they say otherwise, the ranks of the model-stage here share the cores evenly."""
    given = engine_options.parse_options(TrainingOptions, spec.options)
    return given if given.threads else replace(given, threads=cores_per_rank(spec))
