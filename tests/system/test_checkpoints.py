"""Checkpoints of a running job: written beside training, whole or not there, and placed again under other plans."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from nereus_controller.checkpoints import Checkpointer, Described, newest
from nereus_controller.progress import Progress
from nereus_controller.training import TrainingGroup, Update
from nereus_coordinator.jobs import PlacedJob

from nereus.spec.options import CheckpointSpec
from nereus_common.checkpoints import folder as folders
from nereus_common.checkpoints.manifest import read_manifest
from nereus_common.core.emu import Phase
from nereus_common.core.errors import InvalidInput, JobFailed, NotFound, StaleVersion, VerificationFailed
from nereus_common.engines.torch_model.limits import read_config
from nereus_common.state.architecture import ModelShape
from tests.system.stage_services import JOB, SECONDS, Services, plan_of, stage_services, trained
from tests.system.training_cases import make_batch, save_model

pytestmark = pytest.mark.timeout(600)

ONE = plan_of(actor_training="tp1.pp1.fs1", actor_inference="tp1.pp1.fs1")
ALONE = plan_of(actor_training="tp1.pp1.fs1")
OTHER = plan_of(actor_training="tp2.pp1.fs1 x2", actor_inference="tp2.pp1.fs1")
BATCH = make_batch()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama-tied", tmp_path_factory.mktemp("model"))


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with stage_services(tmp_path / "logs") as running:
        yield running


class Job:
    """A placed job, its checkpointer and what was told."""

    def __init__(self, placed: PlacedJob, model: Path, root: Path, **options: Any) -> None:
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.root = root
        self._stages = trained(placed)
        shape = ModelShape.from_config(read_config(str(model)))
        spec = f'{{"models": {{"actor": {{"path": "{model}"}}}}}}'
        placement = placed.placement
        described = Described(JOB, placement.epoch, placement.plan, spec, {"actor": shape})
        chosen = CheckpointSpec(**{"every": 1, **options})
        self.checkpointer = Checkpointer(
            described, self._stages, root, chosen, self._emit, steps=100, timeout=30.0, clock=lambda: 0.0
        )

    async def train(self, step: int) -> None:
        loss = {"name": "policy", "tis_cap": 2.0}
        await TrainingGroup(self._stages[0], SECONDS).step(BATCH, Update(step, loss, 1e-3, 0.5, 1.0))

    async def save(self, step: int) -> Path:
        await self.checkpointer.after_step(Progress(step, 8 * step))
        await self.checkpointer.close()
        return folders.find(self.root, step)

    async def _emit(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.told.append((kind, payload))


async def test_a_job_is_placed_again_from_its_checkpoint_under_another_plan(
    services: Services, model: Path, tmp_path: Path
) -> None:
    job = Job(await services.place(ONE, model), model, tmp_path / "saved", keep=2)
    for step in range(3):
        await job.train(step)
        await job.save(step + 1)
    assert list(folders.complete(job.root)) == [2, 3]
    assert [kind for kind, _ in job.told] == ["checkpoint"] * 3
    told = job.told[-1][1]
    assert (told["step"], told["folder"]) == (3, str(job.root / "step-00000003"))
    assert told["bytes"] == read_manifest(job.root / "step-00000003").model("actor").bytes
    assert sorted(told["seconds"]) == ["snapshot", "write"]
    assert newest(job.root) == (job.root / "step-00000003", Progress(3, 24))

    placed = await services.place(OTHER, model, version=3, checkpoint=job.root / "step-00000003")
    assert [report.version for report in placed.reports] == [3]
    units = [stored.value for stored in await services.registry.units(JOB)]
    assert {(unit.phase, unit.version) for unit in units} == {(Phase.ACTIVE, 3)}

    again = Job(placed, model, tmp_path / "again")
    before = read_manifest(job.root / "step-00000003").model("actor").digests
    assert read_manifest(await again.save(3)).model("actor").digests == before


def test_checkpoints_are_due_after_every_so_many_steps_and_after_the_last() -> None:
    def due(every: int) -> list[int]:
        spec, root = CheckpointSpec(every=every), Path("unused")

        async def emit(kind: str, payload: Mapping[str, Any]) -> None:
            raise AssertionError

        described = Described(JOB, 1, ONE, "{}", {})
        one = Checkpointer(described, (), root, spec, emit, steps=7, timeout=1.0)
        return [step for step in range(1, 8) if one.is_due(step)]

    assert due(0) == []
    assert due(3) == [3, 6, 7]


Block = Callable[[], "Future[Path]"]


@pytest.fixture
def block_writing(monkeypatch: pytest.MonkeyPatch) -> Block:
    """Let the next rank file be a pipe, given when it is there: who writes it waits until somebody reads."""

    def block() -> Future[Path]:
        made: Future[Path] = Future()
        really = folders.begin

        def begin(root: Path, step: int, models: Any) -> Path:
            monkeypatch.undo()
            partial = really(root, step, models)
            pipe = partial / "actor" / "rank-0000.safetensors"
            os.mkfifo(pipe)
            made.set_result(pipe)
            return partial

        monkeypatch.setattr(folders, "begin", begin)
        return made

    return block


async def test_training_goes_on_while_a_checkpoint_is_written(
    services: Services, model: Path, tmp_path: Path, block_writing: Block
) -> None:
    job = Job(await services.place(ALONE, model), model, tmp_path / "saved")
    await job.train(0)
    blocked = block_writing()
    await job.checkpointer.after_step(Progress(1, 8))
    pipe = await asyncio.wrap_future(blocked)
    await job.train(1)
    await job.train(2)
    assert not folders.complete(job.root)
    content = await asyncio.to_thread(pipe.read_bytes)
    assert len(content) > 3 * 4 * ModelShape.from_config(read_config(str(model))).parameters
    await job.checkpointer.close()
    assert [kind for kind, _ in job.told] == ["log"]  # a pipe cannot be synced: a failure, which is told
    assert read_manifest(await job.save(3)).version == 3
    assert [kind for kind, _ in job.told] == ["log", "checkpoint"]


async def test_a_process_killed_while_it_writes_leaves_the_old_checkpoint_the_newest(
    services: Services, model: Path, tmp_path: Path, block_writing: Block
) -> None:
    job = Job(await services.place(ALONE, model), model, tmp_path / "saved")
    await job.train(0)
    await job.save(1)
    await job.train(1)
    blocked = block_writing()
    await job.checkpointer.after_step(Progress(2, 16))
    pipe = await asyncio.wrap_future(blocked)

    def read_and_kill() -> None:
        with pipe.open("rb") as file:
            assert len(file.read(1000)) == 1000
            os.kill(services.pids()[0], signal.SIGKILL)

    await asyncio.to_thread(read_and_kill)
    await job.checkpointer.close()
    assert "was killed by SIGKILL" in job.told[-1][1]["message"]
    assert newest(job.root) == (job.root / "step-00000001", Progress(1, 8))

    resumed = Job(await services.place(ALONE, model, 1, job.root / "step-00000001"), model, job.root)
    await resumed.train(1)
    await resumed.save(2)
    assert sorted(path.name for path in job.root.iterdir()) == ["step-00000001", "step-00000002"]


async def test_the_second_failure_in_a_row_ends_the_job(services: Services, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    job = Job(await services.place(ALONE, model), model, tmp_path / "file" / "saved")
    await job.train(0)
    await job.checkpointer.after_step(Progress(1, 8))
    await job.train(1)
    await job.checkpointer.after_step(Progress(2, 16))
    assert job.told[0][0] == "log" and "checkpoint 1 failed" in job.told[0][1]["message"]
    with pytest.raises(JobFailed, match="two checkpoints in a row failed, the last at step 2"):
        await job.checkpointer.close()


async def test_a_version_that_is_not_held_cannot_be_copied(services: Services, model: Path, tmp_path: Path) -> None:
    job = Job(await services.place(ALONE, model), model, tmp_path / "saved")
    with pytest.raises(StaleVersion, match="holds version 0, not 4"):
        await job.checkpointer.after_step(Progress(4, 32))


async def test_a_damaged_or_unfit_checkpoint_is_refused_by_name_and_nothing_is_left(
    services: Services, model: Path, tmp_path: Path
) -> None:
    job = Job(await services.place(ALONE, model), model, tmp_path / "saved")
    await job.train(0)
    folder = await job.save(1)
    file = folder / "actor" / "rank-0000.safetensors"
    whole = file.read_bytes()
    unit = await services.prepare_beside(model)
    file.rename(file.with_suffix(".lost"))
    for version, where, kind, said in (
        (2, folder, InvalidInput, "holds version 1, not 2"),
        (1, folder, NotFound, r"rank-0000.safetensors"),
        (1, tmp_path / "nowhere", NotFound, r"manifest.json"),
    ):
        with pytest.raises(kind, match=said):
            await unit.load(version, SECONDS, str(where))
    file.with_suffix(".lost").rename(file)
    await unit.load(1, SECONDS, str(folder))

    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(VerificationFailed, match=r"(parameters|exp_avg|exp_avg_sq) of actor are not what .* made of"):
        await services.place(ALONE, model, 1, folder)
    assert not await services.registry.grants()


async def test_only_training_units_take_a_checkpoint(services: Services, model: Path, tmp_path: Path) -> None:
    unit = await services.prepare_beside(model, "actor_inference")
    with pytest.raises(InvalidInput, match="does not train"):
        await unit.load(1, SECONDS, str(tmp_path))
