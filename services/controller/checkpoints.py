"""Checkpoints of a running job: the state is copied aside between two updates and written beside the next ones."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nereus.spec.options import CheckpointSpec
from nereus.v1 import training_pb2 as pb
from nereus.v1.training_pb2_grpc import TrainingServiceStub
from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.index import RankFile, check_coverage, merge, write_index
from nereus_common.checkpoints.manifest import Manifest, ModelEntry, read_manifest
from nereus_common.checkpoints.state import Digests
from nereus_common.core.errors import DeadlineExceeded, JobFailed, NereusError, ResourceExhausted
from nereus_common.core.ids import JobId
from nereus_common.core.plan import Plan
from nereus_common.rpc import calling
from nereus_common.rpc.together import together
from nereus_common.state.architecture import ModelShape

from .placed import PlacedStage
from .progress import Progress

log = logging.getLogger(__name__)

Emit = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Described:
    """What a manifest says of the job. `shapes`: of the trained models. `spec_json`: the JobSpec."""

    job: JobId
    epoch: int
    plan: Plan
    spec_json: str
    shapes: Mapping[str, ModelShape]


def newest(root: Path) -> tuple[Path, Progress] | None:
    """The last complete checkpoint below `root` and where the job stood; None when there is none.

    VerificationFailed when its manifest is damaged. Blocks on the file system.
    """
    known = folders.complete(root)
    if not known:
        return None
    path = known[max(known)]
    manifest = read_manifest(path)
    return path, Progress(manifest.step, manifest.position)


class Checkpointer:
    """Writes one checkpoint at a time. `trained`: the training stage of every trained model.

    A checkpoint that fails is told and the job goes on; the second failure in a row ends it with JobFailed.
    `timeout`: seconds for copying, and again for writing. `clock`: seconds since the Unix epoch.
    """

    def __init__(
        self,
        described: Described,
        trained: Sequence[PlacedStage],
        root: Path,
        spec: CheckpointSpec,
        emit: Emit,
        *,
        steps: int,
        timeout: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._described = described
        self._trained = tuple(trained)
        self._root = root
        self._spec = spec
        self._emit = emit
        self._steps = steps
        self._timeout = timeout
        self._clock = clock
        self._writing: asyncio.Task[None] | None = None
        self._failures = 0

    @property
    def shapes(self) -> Mapping[str, ModelShape]:
        return self._described.shapes

    def is_due(self, step: int) -> bool:
        """After every `every` steps and after the last one; never when `every` is 0."""
        every = self._spec.every
        return every > 0 and (step % every == 0 or step == self._steps)

    async def after_step(self, progress: Progress) -> None:
        """Call between two steps. When a checkpoint is due, returns as soon as the state is copied aside.

        Raises what the training units raise, and JobFailed for the second failure in a row.
        """
        if self._writing is not None and self._writing.done():
            await self._finish()
        if not self.is_due(progress.step):
            return
        await self._finish()
        started = time.monotonic()
        try:
            await together(self._take(stage, progress.step) for stage in self._trained)
        except ResourceExhausted as full:
            await self._failed(progress.step, full)
            return
        copied = time.monotonic() - started
        self._writing = asyncio.create_task(self._write(progress, copied), name=f"checkpoint {progress.step}")

    def move(self, described: Described, trained: Sequence[PlacedStage]) -> None:
        """The job runs under another plan; call `close` before, so that nothing is written from units that go."""
        self._described, self._trained = described, tuple(trained)

    async def close(self) -> None:
        """Wait for what is being written; it may be used on. Raises as `after_step` does."""
        await self._finish()

    async def _finish(self) -> None:
        """Wait for the checkpoint in flight, at most until its deadline, and count how it went.

        Whoever is cancelled here stops waiting, and the checkpoint is written on: to cancel it in his stead would lose
        his cancellation where it ends by itself just then.
        """
        writing = self._writing
        if writing is not None:
            await asyncio.wait([writing])
            self._writing = None
            writing.result()

    async def _write(self, progress: Progress, copied: float) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                path, size = await self._write_all(progress)
        except TimeoutError:
            late = f"checkpoint {progress.step} was not written to {self._root} within {self._timeout:g} s"
            await self._failed(progress.step, DeadlineExceeded(late, remedy="is the file system slow or stuck?"))
        except (NereusError, OSError) as error:
            await self._failed(progress.step, error)
        else:
            self._failures = 0
            seconds = {"snapshot": copied, "write": time.monotonic() - started}
            told = {"step": progress.step, "folder": str(path), "bytes": size, "seconds": seconds}
            await self._emit("checkpoint", told)

    async def _write_all(self, progress: Progress) -> tuple[Path, int]:
        """The complete folder, and the bytes of tensors in it."""
        models = [stage.name.model for stage in self._trained]
        partial = await asyncio.to_thread(folders.begin, self._root, progress.step, models)
        written = await together(self._write_model(stage, progress.step, partial) for stage in self._trained)
        entries = dict(zip(models, written, strict=True))
        manifest = self._manifest(progress, entries)
        path = await asyncio.to_thread(folders.commit, partial, manifest)
        await asyncio.to_thread(folders.prune, self._root, self._spec.keep)
        return path, sum(entry.bytes for entry in written)

    async def _take(self, stage: PlacedStage, version: int) -> None:
        unit = stage.units[0]
        request = pb.TakeSnapshotRequest(unit_id=unit.id, epoch=unit.epoch, version=version)
        with calling("TakeSnapshot", unit.service):
            await TrainingServiceStub(unit.channel).TakeSnapshot(request, timeout=self._timeout)

    async def _write_model(self, stage: PlacedStage, version: int, partial: Path) -> ModelEntry:
        """Replicas hold the same state, so the first one writes."""
        unit, model = stage.units[0], stage.name.model
        request = pb.WriteSnapshotRequest(
            unit_id=unit.id, epoch=unit.epoch, version=version, folder=str(partial / model)
        )
        with calling("WriteSnapshot", unit.service):
            answer = await TrainingServiceStub(unit.channel).WriteSnapshot(request, timeout=self._timeout)
        files = [RankFile.from_json(text, f"WriteSnapshot of {unit.id}") for text in answer.parts_json]
        return await asyncio.to_thread(_index, partial, model, files, self._described.shapes[model])

    def _manifest(self, progress: Progress, models: Mapping[str, ModelEntry]) -> Manifest:
        described = self._described
        return Manifest(
            job=described.job,
            step=progress.step,
            version=progress.step,
            position=progress.position,
            epoch=described.epoch,
            created=datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds"),
            spec=json.loads(described.spec_json),
            plan=json.loads(described.plan.to_json()),
            models=models,
        )

    async def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        message = f"checkpoint {step} failed: {error}"
        log.warning("job %s: %s", self._described.job, message)
        await self._emit("log", {"level": "warning", "message": message})
        if self._failures > 1:
            raise JobFailed(f"two checkpoints in a row failed, the last at step {step}: {error}") from error


def _index(partial: Path, model: str, files: Sequence[RankFile], shape: ModelShape) -> ModelEntry:
    """Join the ranks' parts into the model's index, checked and written."""
    index = merge(files)
    check_coverage(index, shape)
    path, sha256 = write_index(partial / model, index)
    digests = Digests.sum(file.digests for file in files)
    return ModelEntry(str(path.relative_to(partial)), sha256, digests, sum(file.bytes for file in files))
