"""A frozen model goes from holder to holder, on real processes over UCX, and its folder is read once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from nereus_coordinator.moving import move_state
from nereus_inference.unit import InferenceUnit

from nereus_common.core.emu import Phase
from nereus_common.core.errors import (
    IllegalTransition,
    InvalidInput,
    NotFound,
    ProcessLost,
    StaleVersion,
    Unavailable,
    VerificationFailed,
)
from nereus_common.core.ids import JobId, TensorName, UnitId
from nereus_common.core.transfer import RankRef, Transfer
from nereus_common.rpc.ports import free_port
from nereus_common.stages.base import HostSettings, PullOrder, Rendezvous, UnitSpec, state_holder
from nereus_common.stages.units import Units
from nereus_common.transitions.dag import Mode
from tests.system.moves import BUCKET_BYTES, LocalUnit, move
from tests.system.rank_processes import RankProcesses
from tests.system.scorers import REFERENCE, Scorers
from tests.system.training_cases import make_batch, make_plan, save_model

ONE = "tp1.pp1.fs1"
CHAIN = [ONE, "tp2.pp1.fs1", "tp1.pp1.fs2", "tp1.pp2(1+3).fs1", f"{ONE} x2"]
VERSION = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama-tied", tmp_path_factory.mktemp("model"))


def _folder_without_weights(model: Path, folder: Path) -> Path:
    """What a unit needs to be built, and nothing to fill it from."""
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    return folder


async def test_moved_weights_score_and_hash_like_those_read_from_the_folder_in_every_layout(
    model: Path, ranks: RankProcesses, tmp_path: Path
) -> None:
    batch, bare = make_batch(), _folder_without_weights(model, tmp_path / "bare")
    old = Scorers(ranks, model, CHAIN[0], 0, 1)
    await old.prepare()
    await old.load()
    digests = set(await old.digests(VERSION))
    for hop, layout in enumerate(CHAIN[1:], 1):
        new = Scorers(ranks, bare, layout, 2 * (hop % 2), hop + 1)
        await new.prepare()
        await move(old, new, VERSION, Mode.IN_PLACE if hop % 2 else Mode.SHADOW)
        await new.commit(VERSION)
        await old.release()
        digests |= set(await new.digests(VERSION))
        assert len(digests) == 1, layout

        unmoved = Scorers(ranks, model, layout, 2 * ((hop + 1) % 2), 100 + hop)
        await unmoved.prepare()
        await unmoved.load()
        for moved, read in zip(await new.scores(batch), await unmoved.scores(batch), strict=True):
            np.testing.assert_array_equal(moved, read, err_msg=layout)
        await unmoved.release()
        old = new
    await old.release()


async def test_an_offer_refuses_other_work_until_it_is_withdrawn_and_a_drained_unit_until_it_is_filled_again(
    model: Path, ranks: RankProcesses
) -> None:
    scorers, batch = Scorers(ranks, model, "tp2.pp1.fs1", 0, 1), make_batch()
    (unit,) = scorers.units
    try:
        await scorers.prepare()
        await scorers.load()
        before = await scorers.scores(batch)
        with pytest.raises(StaleVersion, match="holds version 0, not 3"):
            await unit.offer(3, 10.0)
        offered = await unit.offer(VERSION, 10.0)
        assert await unit.offer(VERSION, 10.0) == offered == await unit.describe(10.0, state=True)
        with pytest.raises(IllegalTransition, match="offering"):
            await scorers.scores(batch)
        await unit.withdraw(10.0)
        np.testing.assert_array_equal(await scorers.scores(batch), before)

        await unit.offer(VERSION, 10.0)
        head = TensorName("model.embed_tokens.weight")
        for _ in range(2):
            await unit.drop([head], 10.0)
        held = await unit.offer(VERSION, 10.0)
        assert all(head not in rank.boxes and rank.boxes for rank in held.ranks)
        with pytest.raises(IllegalTransition, match="drained"):
            await unit.withdraw(10.0)
        with pytest.raises(StaleVersion):
            await unit.digest(VERSION, 10.0)

        await scorers.load()
        np.testing.assert_array_equal(await scorers.scores(batch), before)
        held = await unit.offer(VERSION, 10.0)
        assert all(head in rank.boxes for rank in held.ranks)
    finally:
        await scorers.release()


async def test_a_unit_that_was_not_filled_whole_and_in_its_dtype_never_scores(
    model: Path, ranks: RankProcesses
) -> None:
    old, new = Scorers(ranks, model, ONE, 0, 1), Scorers(ranks, model, ONE, 2, 2)
    (source,), (target,) = old.units, new.units
    try:
        await old.prepare()
        await old.load()
        await new.prepare()
        (rank,) = (await source.offer(VERSION, 10.0)).ranks
        holder = RankRef(state_holder(source.id), 0)
        moves = [
            Transfer(name, box, holder, RankRef(target.id, 0)) for name, boxes in rank.boxes.items() for box in boxes
        ]

        def order(transfers: list[Transfer], dtype: str = "bfloat16") -> PullOrder:
            return PullOrder(VERSION, dtype, transfers, {holder: rank.address}, 20.0, "t", state=True)

        with pytest.raises(InvalidInput, match="holds its weights in bfloat16, not float32"):
            await target.pull(order(moves, "float32"))
        with pytest.raises(VerificationFailed, match=f"1 tensors of version 0 are not whole; {moves[3].tensor} lacks"):
            await target.pull(order(moves[:3] + moves[4:]))
        with pytest.raises(NotFound, match="has not pulled version 0"):
            await target.commit(VERSION)
        with pytest.raises(IllegalTransition, match="does no work"):
            await new.scores(make_batch())
        (missing,) = await target.pull(order(moves))  # what came the first time is here
        assert missing.bytes == 2 * moves[3].box.elements
        await target.commit(VERSION)
        np.testing.assert_array_equal(await new.digests(VERSION), [(await source.digest(VERSION, 10.0))["parameters"]])
    finally:
        await old.release()
        await new.release()


def _unit(table: Units, model: Path, epoch: int) -> LocalUnit:
    """One whose rank is a worker process of its own."""
    spec = UnitSpec(
        unit=UnitId(f"moved.reference.inference.e{epoch}.r0"),
        job=JobId("moved"),
        model_stage=REFERENCE,
        replica=0,
        epoch=epoch,
        model_path=str(model),
        plan=make_plan(ONE, "bfloat16"),
        engine="",
        options={"threads": 1},
        rendezvous=Rendezvous("127.0.0.1", free_port(), "p"),
        seed=0,
    )
    return LocalUnit(table, spec)


async def test_a_holder_killed_while_it_is_read_is_named_and_the_new_unit_never_scores(
    model: Path, tmp_path: Path
) -> None:
    settings = HostSettings(tmp_path)
    table = Units(lambda spec: InferenceUnit(spec, settings, lambda lost: table.note_loss(spec.unit, lost)))
    old, new = _unit(table, model, 1), _unit(table, model, 2)
    try:
        await asyncio.gather(*(table.prepare(unit.spec, 120.0) for unit in (old, new)))
        await table.load(old.id, 1, VERSION, 30.0)
        await old.commit(VERSION)
        entry = {one.spec.unit: one for one in table.entries()}
        (source,) = entry[old.id].host.pids
        await old.offer(VERSION, 10.0)
        digest = await old.digest(VERSION, 10.0)
        pulling = asyncio.create_task(_move(old, new, {source: signal.SIGSTOP}, digest))
        await asyncio.sleep(1.0)
        os.kill(source, signal.SIGKILL)
        with pytest.raises((Unavailable, ProcessLost), match=str(old.id)):
            await pulling
        assert entry[new.id].unit.phase is Phase.PREPARED
        with pytest.raises(IllegalTransition, match="does no work"):
            table.serving(new.id, 2)
        await table.load(new.id, 2, VERSION, 30.0)  # from the folder instead
        await new.commit(VERSION)
        assert await new.digest(VERSION, 10.0) == digest
    finally:
        await table.release_all()


async def _move(old: LocalUnit, new: LocalUnit, strikes: dict[int, int], digest: dict[str, int]) -> None:
    class Struck(LocalUnit):
        """Hit by signals when its first pull begins."""

        async def pull(self, order: PullOrder):  # type: ignore[no-untyped-def]
            for pid, number in strikes.items():
                os.kill(pid, number)
            return await super().pull(order)

    async def note(number: int) -> None:
        pass

    await move_state(
        [old],
        [Struck(new.units, new.spec)],
        VERSION,
        mode=Mode.SHADOW,
        transition="t1",
        timeout=30.0,
        after_round=note,
        expected=digest,
        bucket_bytes=BUCKET_BYTES,
        wire_dtype="bfloat16",
    )
