"""The pool while its units are replaced: real servers, units and engines (Hugging Face modules)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from nereus_controller.generation import GenerationPool, InFlight, Requeued, Sampling
from nereus_controller.placed import PlacedStage, PlacedUnit
from nereus_generation.servicer import GenerationServicer
from nereus_generation.unit import GenerationUnit

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server
from nereus_common.core.errors import DeadlineExceeded, InvalidInput, Unavailable
from nereus_common.core.ids import JobId, ModelStage, Stage, UnitId
from nereus_common.engines.generation import base
from nereus_common.rl.assembly import Completion
from nereus_common.rpc import DeadlineChannel, calling
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.base import HostSettings, Rendezvous, UnitSpec
from nereus_common.stages.units import Units
from tests.system.generation_units import CALL_SECONDS, PROMPT, Reference, plan
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
ACTOR = ModelStage("actor", Stage.GENERATION)
LENGTH = 400
GREEDY = Sampling(0.0, 1.0, 0, LENGTH, ())
NEW_VERSION = 7


@dataclass
class Scene:
    """Two units on one service: one that serves version 1, and one that serves the same weights as NEW_VERSION."""

    units: Units
    reference: Reference
    service: str
    channel: grpc.aio.Channel

    def placed(self, *epochs: int) -> PlacedStage:
        found = tuple(
            PlacedUnit(_unit_id(epoch), replica, epoch, self.service, self.channel)
            for replica, epoch in enumerate(epochs)
        )
        return PlacedStage(ACTOR, plan(max_length=512), found)

    def pool(self, timeout: float = CALL_SECONDS) -> GenerationPool:
        return GenerationPool(self.placed(1), timeout)

    async def under_way(self, samples: int = 1, epoch: int = 1) -> None:
        """Wait until the unit samples."""
        (entry,) = [one for one in self.units.entries() if one.spec.epoch == epoch]
        (worker,) = entry.host._workers.workers  # type: ignore[attr-defined]
        for _ in range(400):
            if (await worker.call("stats", timeout=CALL_SECONDS))["active"] >= samples:
                return
            await asyncio.sleep(0.02)
        pytest.fail("nothing was under way")


def _unit_id(epoch: int) -> UnitId:
    return UnitId(f"job.actor.generation.e{epoch}.r0")


async def _serve(units: Units, folder: Path, epoch: int, version: int) -> None:
    spec = UnitSpec(
        unit=_unit_id(epoch),
        job=JobId("job"),
        model_stage=ACTOR,
        replica=0,
        epoch=epoch,
        model_path=str(folder),
        plan=plan(max_length=512),
        engine="transformers",
        options={},
        rendezvous=Rendezvous("127.0.0.1", 1, "p"),
        seed=epoch,
    )
    await units.prepare(spec, CALL_SECONDS)
    await units.load(spec.unit, epoch, version, CALL_SECONDS)
    await units.commit(spec.unit, epoch, version, CALL_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    settings = HostSettings(Path(tmp_path_factory.mktemp("logs")))
    units = Units(lambda spec: GenerationUnit(spec, settings, lambda lost: units.note_loss(spec.unit, lost)))
    server = RpcServer("generation")
    server.add(add_GenerationServiceServicer_to_server, GenerationServicer(units))
    try:
        await asyncio.gather(_serve(units, folder, 1, 1), _serve(units, folder, 2, NEW_VERSION))
        await server.start()
        async with DeadlineChannel(server.target) as channel:
            yield Scene(units, Reference.load(folder, "float32"), server.target, channel)
    finally:
        await server.stop(0)
        await units.release_all()


def _begin(pool: GenerationPool, samples: int = 1, sampling: Sampling = GREEDY) -> asyncio.Task[list[Completion]]:
    return asyncio.create_task(pool.sample(pool.units[0], PROMPT, samples, sampling))


@pytest.mark.parametrize("across", [False, True])
async def test_responses_handed_back_go_on_where_their_unit_is_replaced_and_no_token_is_lost_or_repeated(
    scene: Scene, across: bool
) -> None:
    pool = scene.pool()
    running = _begin(pool, 3, Sampling(0.9, 1.0, 0, LENGTH, (), across_versions=across))
    await scene.under_way()
    await asyncio.sleep(0.1)
    assert await pool.drain("resume", 30.0) == 0
    await asyncio.sleep(0.2)
    assert not running.done(), "it waits for the unit that takes its place"
    pool.replace(scene.placed(2))
    crossed = 0
    for found in await running:
        assert len(found.token_ids) == len(found.logprobs) == len(found.versions) == LENGTH
        assert list(found.versions) == sorted(found.versions) and set(found.versions) <= {1, NEW_VERSION}
        crossed += len(set(found.versions)) > 1
        asked = base.GenerationRequest("r", PROMPT, base.Sampling(LENGTH, temperature=0.9))
        expected = scene.reference.logprobs(asked, found.token_ids)  # both versions are the same weights
        np.testing.assert_allclose(found.logprobs, expected, atol=5e-4)
    assert crossed > 0
    await _admit(scene)


async def _admit(scene: Scene) -> None:
    """Unit 1 takes requests again."""
    request = pb.ResumeUnitRequest(unit_id=_unit_id(1), epoch=1)
    await GenerationServiceStub(scene.channel).ResumeUnit(request, timeout=CALL_SECONDS)


async def test_what_is_finished_on_its_unit_is_of_that_unit_and_what_comes_meanwhile_waits(scene: Scene) -> None:
    pool = scene.pool()
    first = _begin(pool)
    await scene.under_way()
    assert await pool.drain("finish", 0.01) == 1
    second = _begin(pool)
    assert await pool.drain("finish", 30.0) == 0
    (whole,) = await first
    assert set(whole.versions) == {1} and list(whole.token_ids) == scene.reference.greedy(PROMPT, LENGTH)
    assert not second.done()
    pool.replace(scene.placed(2))
    (later,) = await second
    assert (later.token_ids, set(later.versions)) == (whole.token_ids, {NEW_VERSION})
    await _admit(scene)


async def test_after_an_undo_responses_go_on_on_the_units_they_came_from(scene: Scene) -> None:
    pool = scene.pool()
    running = _begin(pool, 2)
    await scene.under_way()
    assert await pool.drain("resume", 30.0) == 0
    await pool.undo()
    for found in await running:
        assert list(found.token_ids) == scene.reference.greedy(PROMPT, LENGTH)
        assert set(found.versions) == {1}


async def test_a_group_of_which_anything_is_thrown_away_is_thrown_away_whole(scene: Scene) -> None:
    pool = scene.pool()
    running = _begin(pool, 3)
    await scene.under_way()
    assert await pool.drain("requeue", 30.0) == 0
    with pytest.raises(Requeued, match=_unit_id(1)):
        await running
    turn = _begin(pool)  # of a dialogue that had begun under the old version
    await asyncio.sleep(0.05)
    assert not turn.done()
    pool.replace(scene.placed(2))
    with pytest.raises(Requeued):
        await turn
    (found,) = await _begin(pool)
    assert set(found.versions) == {NEW_VERSION}
    await _admit(scene)


@pytest.mark.parametrize("how", ["resume", "requeue", "finish"])
async def test_work_spread_over_the_units_is_done_once_each_whatever_becomes_of_its_unit(
    scene: Scene, how: InFlight
) -> None:
    pool = scene.pool()
    done: list[int] = []

    async def one(number: int, unit: PlacedUnit) -> None:
        await pool.sample(unit, PROMPT, 1, GREEDY)
        done.append(number)

    spreading = asyncio.create_task(pool.spread([lambda unit, n=n: one(n, unit) for n in range(4)], 4))  # type: ignore[misc]
    await scene.under_way()
    await pool.drain(how, 30.0)
    pool.replace(scene.placed(2))
    await spreading
    assert sorted(done) == [0, 1, 2, 3]
    await _admit(scene)


async def test_units_that_stay_sample_on_while_others_are_drained(scene: Scene) -> None:
    pool = GenerationPool(scene.placed(1, 2), CALL_SECONDS)
    gone, stays = pool.units
    await pool.drain("finish", 30.0, [gone])
    (found,) = await pool.sample(stays, PROMPT, 1, GREEDY)
    assert set(found.versions) == {NEW_VERSION}
    await pool.undo()
    (found,) = await pool.sample(gone, PROMPT, 1, GREEDY)
    assert set(found.versions) == {1}


async def test_a_wait_for_the_unit_that_takes_ones_place_has_an_end(scene: Scene) -> None:
    pool = scene.pool(timeout=0.5)
    await pool.drain("finish", 1.0)
    with pytest.raises(DeadlineExceeded, match=rf"unit {_unit_id(1)} is to go, and no other has taken its place"):
        await _begin(pool)
    await pool.undo()


async def test_a_drain_must_say_how_and_only_one_who_drained_a_unit_takes_its_refusal_lightly(scene: Scene) -> None:
    stub, unit = GenerationServiceStub(scene.channel), _unit_id(1)
    with pytest.raises(InvalidInput, match="says how"), calling("DrainUnit", unit):
        await stub.DrainUnit(pb.DrainUnitRequest(unit_id=unit, epoch=1), timeout=5)
    await stub.DrainUnit(pb.DrainUnitRequest(unit_id=unit, epoch=1, how=pb.DRAIN_FINISH), timeout=5)
    with pytest.raises(Unavailable, match="being drained"):
        await _begin(scene.pool())
    await _admit(scene)
