"""What goes wrong while a state is moved: named, refused, and nothing half-filled ever serves or trains."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nereus_controller.training import TrainingGroup, Update
from nereus_coordinator.moving import MoveReport, StateUnit, agreed_digests, move_state
from nereus_coordinator.remote_unit import RemoteUnit

from nereus_common.core.emu import Phase
from nereus_common.core.errors import IllegalTransition, ProcessLost, Unavailable, VerificationFailed
from nereus_common.core.ids import Stage, UnitId
from nereus_common.core.transfer import Box
from nereus_common.stages.base import PullOrder, RankPulled
from nereus_common.transitions.dag import Mode
from tests.system.moves import BUCKET_BYTES, Group, move
from tests.system.rank_processes import RankProcesses
from tests.system.stage_services import Services, plan_of, stage_services, trained
from tests.system.training_cases import make_batch, save_model

TWO = "tp1.pp1.fs2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama-tied", tmp_path_factory.mktemp("model"))


@dataclass
class Interrupted:
    """A unit about whose first pull something happens."""

    unit: StateUnit
    before_pull: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unit, name)

    async def pull(self, order: PullOrder) -> Sequence[RankPulled]:
        self.before_pull()
        pulled: Sequence[RankPulled] = await self.unit.pull(order)
        return pulled


async def remote_move(
    old: Sequence[StateUnit], new: Sequence[StateUnit], version: int, mode: Mode = Mode.SHADOW, **given: Any
) -> MoveReport:
    async def note(number: int) -> None:
        pass

    return await move_state(
        old,
        new,
        version,
        mode=mode,
        transition="t9",
        timeout=30.0,
        after_round=note,
        bucket_bytes=BUCKET_BYTES,
        **given,
    )


def halt_then_kill(stopped: int, killed: int) -> Callable[[], None]:
    """Stop one process, so that the pull is under way for sure, and kill one a moment later."""

    def strike() -> None:
        os.kill(stopped, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, os.kill, killed, signal.SIGKILL)

    return strike


def entry_of(services: Services, unit: UnitId) -> Any:
    return next(entry for entry in services.units[Stage.TRAINING].entries() if entry.spec.unit == unit)


@pytest.mark.long
async def test_losing_either_end_of_a_move_is_named_and_leaves_the_other_as_it_should_be(
    model: Path, tmp_path: Path
) -> None:
    async with stage_services(tmp_path) as services:
        placed = await services.place(plan_of(actor_training=TWO), model)
        old: list[RemoteUnit] = list(placed.units)
        sources = services.pids()
        group = TrainingGroup(trained(placed)[0], 60.0)
        update = Update(0, {"name": "policy", "tis_cap": 2.0}, 1e-3, 1.0, 0.9)
        assert (await group.step(make_batch(), update)).version == 1

        new = await services.prepare_beside(model)
        (target,) = entry_of(services, new.id).host.pids
        with pytest.raises(ProcessLost, match=rf"pid {target}"):
            await remote_move(old, [Interrupted(new, halt_then_kill(sources[1], target))], 1)
        os.kill(sources[1], signal.SIGCONT)
        with pytest.raises(IllegalTransition, match="offering"):
            services.units[Stage.TRAINING].serving(old[0].id, old[0].unit.epoch)
        await old[0].withdraw(30.0)
        await new.release(30.0)
        again = Update(1, {"name": "policy", "tis_cap": 2.0}, 1e-3, 1.0, 0.9)
        assert (await group.step(make_batch(), again)).version == 2

        new = await services.prepare_beside(model)
        with pytest.raises((Unavailable, ProcessLost)) as lost:
            await remote_move(old, [Interrupted(new, halt_then_kill(sources[1], sources[1]))], 2)
        assert str(old[0].id) in str(lost.value)
        entry = entry_of(services, new.id)
        assert entry.unit.phase is Phase.PREPARED
        with pytest.raises(IllegalTransition, match="does no work"):
            services.units[Stage.TRAINING].serving(new.id, new.unit.epoch)


def damage_what_is_sent() -> None:
    """In a source's process: a bit of every chunk is another one on the way."""
    from nereus_common.transport import chunking, serving

    def send_damaged(*given: Any, **options: Any) -> Any:
        data, digest = chunking.payload(*given, **options)
        damaged = data.copy()
        damaged[0] ^= 1
        return damaged, digest

    serving.payload = send_damaged  # type: ignore[attr-defined]


def repair_what_is_sent() -> None:
    from nereus_common.transport import chunking, serving

    serving.payload = chunking.payload  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "said"), [(Mode.SHADOW, "not what the other units hold"), (Mode.IN_PLACE, "not what was sent")]
)
async def test_damaged_bytes_are_refused_and_the_old_unit_trains_on_as_if_nothing_had_been(
    model: Path, ranks: RankProcesses, mode: Mode, said: str
) -> None:
    old, new = Group(ranks, model, TWO, 0, 1), Group(ranks, model, "tp1.pp2.fs1", 2, 2)
    try:
        await asyncio.gather(old.prepare(), new.prepare())
        await old.load()
        await old.train(0)
        ranks.run(damage_what_is_sent, [()] * 2)
        with pytest.raises(VerificationFailed, match=said):
            await move(old, new, 1, mode)
        ranks.run(repair_what_is_sent, [()] * 2)
        with pytest.raises(IllegalTransition):
            new.table.serving(new.units[0].id, 2)
        await new.release()
        new = Group(ranks, model, "tp1.pp2.fs1", 2, 3)
        await new.prepare()
        before = await agreed_digests(old.units, 1, 10.0)
        await old.units[0].withdraw(10.0)
        assert (await old.train(1)).version == 2
        await old.units[0].offer(2, 10.0)
        with pytest.raises(IllegalTransition, match="offers its state"):
            await old.train(2)
        report = await move(old, new, 2, Mode.SHADOW)
        assert report.digests != before
        assert report.bytes_moved == report.bytes_needed
        await new.commit(2)
        assert (await new.train(2)).version == 3
    finally:
        await old.release()
        await new.release()


async def test_a_move_stopped_between_rounds_goes_back_and_may_be_made_again(model: Path, ranks: RankProcesses) -> None:
    old, new = Group(ranks, model, TWO, 0, 1), Group(ranks, model, "tp1.pp2(1+3).fs1", 2, 2)
    try:
        await asyncio.gather(old.prepare(), new.prepare())
        await old.load()
        await old.train(0)
        digests = await agreed_digests(old.units, 1, 10.0)

        await stopped_after(4, old, new)
        with pytest.raises(IllegalTransition):
            await old.units[0].withdraw(10.0)
        back = await remote_move(new.units, old.units, 1, expected=digests, refill=True)  # the reverse move
        everything = sum(box.elements for box in await _boxes_of(old)) * 4
        assert 0 < back.bytes_moved == back.bytes_needed < everything, "what was never dropped is not moved"
        await old.commit(1)
        assert (await old.train(1)).version == 2
        await new.release()

        new = Group(ranks, model, "tp1.pp2(1+3).fs1", 2, 3)
        await new.prepare()
        digests = await agreed_digests(old.units, 2, 10.0)
        report = await remote_move(old.units, new.units, 2, Mode.IN_PLACE)
        assert report.digests == digests and report.rounds > 4
        await new.commit(2)
        assert (await new.train(2)).version == 3
    finally:
        await old.release()
        await new.release()


async def _boxes_of(group: Group) -> list[Box]:
    holding = await group.units[0].describe(10.0, state=True)
    return [box for rank in holding.ranks for region in rank.boxes.values() for box in region]


class Stopped(Exception):
    pass


async def stopped_after(rounds: int, old: Group, new: Group) -> None:
    """An in-place move whose round `rounds` arrives and is never noted."""

    async def note(number: int) -> None:
        if number == rounds:
            raise Stopped

    with pytest.raises(Stopped):
        await move_state(
            old.units,
            new.units,
            1,
            mode=Mode.IN_PLACE,
            transition="t9",
            timeout=30.0,
            after_round=note,
            bucket_bytes=BUCKET_BYTES,
        )
