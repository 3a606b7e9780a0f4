"""GenerationService on the wire, while new weights come: a real server, unit and engine (Hugging Face modules)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nereus_generation.servicer import GenerationServicer
from nereus_generation.unit import GenerationUnit

from nereus.v1 import generation_pb2 as pb
from nereus.v1.generation_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server
from nereus_common.core.errors import DeadlineExceeded, IllegalTransition
from nereus_common.core.ids import JobId, ModelStage, Stage, UnitId
from nereus_common.core.transfer import Box, RankRef, Transfer
from nereus_common.rpc import DeadlineChannel, calling
from nereus_common.rpc.server import RpcServer
from nereus_common.stages.base import HostSettings, PullOrder, Rendezvous, UnitSpec
from nereus_common.stages.units import Units
from nereus_common.transport import open_transport
from tests.system.generation_units import CALL_SECONDS, HOLDER, PROMPT, Reference, plan
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
UNIT = UnitId("job.actor.generation.e1.r0")
EPOCH = 1


@dataclass
class Served:
    """A unit that serves version 1, its service, and the holder of later versions."""

    stub: Any
    units: Units
    reference: Reference
    source: Any

    async def apply(self) -> int:
        """Pull and verify the next version; it is not committed yet."""
        self.reference.scale(1.0)
        version, bits = self.reference.version, self.reference.bits()
        self.source.publish(HOLDER, version, {name: [(Box.whole(array.shape), array)] for name, array in bits.items()})
        holding = await self.units.describe(UNIT, EPOCH, CALL_SECONDS)
        target = RankRef(UNIT, 0)
        transfers = [
            Transfer(name, box, HOLDER, target) for name, boxes in holding.ranks[0].boxes.items() for box in boxes
        ]
        order = PullOrder(version, "float32", transfers, {HOLDER: self.source.address}, 30.0, "t")
        await self.units.pull(UNIT, EPOCH, order)
        await self.units.verify(UNIT, EPOCH, version, "float32", {}, CALL_SECONDS)
        return version

    async def commit(self, version: int) -> None:
        await self.units.commit(UNIT, EPOCH, version, CALL_SECONDS)

    async def counters(self) -> dict[str, int]:
        (entry,) = self.units.entries()
        (worker,) = entry.host._workers.workers  # type: ignore[attr-defined]
        return dict(await worker.call("stats", timeout=CALL_SECONDS))

    async def until(self, **wanted: int) -> None:
        for _ in range(200):
            found = await self.counters()
            if all(found[name] == value for name, value in wanted.items()):
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"never {wanted}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    settings = HostSettings(Path(tmp_path_factory.mktemp("logs")))
    units = Units(lambda spec: GenerationUnit(spec, settings, lambda lost: units.note_loss(spec.unit, lost)))
    spec = UnitSpec(
        unit=UNIT,
        job=JobId("job"),
        model_stage=ModelStage("actor", Stage.GENERATION),
        replica=0,
        epoch=EPOCH,
        model_path=str(folder),
        plan=plan(max_length=512),
        engine="transformers",
        options={},
        rendezvous=Rendezvous("127.0.0.1", 1, "p"),
        seed=0,
    )
    await units.prepare(spec, CALL_SECONDS)
    await units.load(UNIT, EPOCH, 1, CALL_SECONDS)
    await units.commit(UNIT, EPOCH, 1, CALL_SECONDS)
    server = RpcServer("generation")
    server.add(add_GenerationServiceServicer_to_server, GenerationServicer(units))
    await server.start()
    source = open_transport("ucx")
    try:
        async with DeadlineChannel(server.target) as channel:
            yield Served(GenerationServiceStub(channel), units, Reference.load(folder, "float32"), source)
    finally:
        await server.stop(0)
        await units.release_all()
        source.close()


def _request(name: str, *, across: bool = True, max_tokens: int = 300) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        unit_id=UNIT,
        epoch=EPOCH,
        request_id=name,
        prompt_token_ids=PROMPT,
        samples=2,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, max_tokens=max_tokens),
        version=-1,
        stream_interval=1,
        across_versions=across,
    )


async def _read(call: Any, pieces: list[pb.GenerateResponse]) -> None:
    with calling("Generate", UNIT):
        async for piece in call:
            pieces.append(piece)


async def test_a_call_goes_on_under_the_version_committed_while_it_ran(served: Served) -> None:
    pieces: list[pb.GenerateResponse] = []
    running = asyncio.create_task(_read(served.stub.Generate(_request("across"), timeout=CALL_SECONDS), pieces))
    await served.until(active=2)
    version = await served.apply()
    late = served.stub.Generate(_request("late", max_tokens=3), timeout=CALL_SECONDS)
    with pytest.raises(IllegalTransition):
        await _read(served.stub.Generate(_request("plain", across=False), timeout=CALL_SECONDS), [])
    came: list[pb.GenerateResponse] = []
    waiting = asyncio.create_task(_read(late, came))
    await served.until(parked=4)
    await served.commit(version)
    await asyncio.gather(running, waiting)
    for sample in range(2):
        mine = [piece for piece in pieces if piece.sample == sample]
        assert sum(len(piece.token_ids) for piece in mine) == 300
        assert [piece.version for piece in mine] == sorted(piece.version for piece in mine)
        assert {piece.version for piece in mine} == {version - 1, version}
        assert [token for piece in mine for token in piece.token_ids] == served.reference.greedy(PROMPT, 300)
        assert mine[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert {piece.version for piece in came} == {version}


async def test_a_deadline_while_parked_names_the_unit_and_what_it_waited_for(served: Served) -> None:
    running = asyncio.create_task(_read(served.stub.Generate(_request("deadline"), timeout=5), []))
    await served.until(active=2)
    version = await served.apply()
    with pytest.raises(DeadlineExceeded, match=f"unit {UNIT} to serve a version again.*version {version} waits"):
        await running
    await served.until(parked=0)
    await served.commit(version)


async def test_a_call_cancelled_while_parked_is_aborted(served: Served) -> None:
    call = served.stub.Generate(_request("cancelled"), timeout=CALL_SECONDS)
    running = asyncio.create_task(_read(call, []))
    await served.until(active=2)
    version = await served.apply()
    await served.until(parked=2)
    call.cancel()
    await served.until(active=0, parked=0)
    await asyncio.wait([running])
    assert running.cancelled() or running.exception() is not None
    await served.commit(version)
