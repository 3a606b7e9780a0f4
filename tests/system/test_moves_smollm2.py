"""The state of a real pretrained model moved along a chain of layouts, and what a move in place takes of memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.memory import Peaks
from nereus_common.core.ids import DeviceId
from nereus_common.stages.cores import KEEP_MEMORY
from nereus_common.state import program
from nereus_common.transitions.dag import Mode
from tests.system.moves import Group, move, ranks_of
from tests.system.rank_processes import RankProcesses
from tests.system.training_cases import VOCABULARY, import_engines, make_batch

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CHAIN = ["tp1.pp1.fs2", "tp1.pp2.fs1", "tp3.pp1.fs1", "tp1.pp1.fs1 x3", "tp1.pp1.fs1"]
BUCKET_BYTES = 64 << 20


@pytest.fixture(scope="module")
def six() -> Iterator[RankProcesses]:
    """With the allocator's settings of a unit's workers."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in KEEP_MEMORY.items():
            environment.setenv(name, value)
        processes = RankProcesses(6, spawned=True)
    try:
        processes.run(import_engines, [()] * 6, timeout=480)
        yield processes
    finally:
        processes.close()


async def test_the_state_is_the_same_along_the_chain(smollm2: Path, six: RankProcesses) -> None:
    batch = make_batch(groups=2, per_group=2)
    assert batch.prompt_tokens.max() < VOCABULARY
    old = Group(six, smollm2, CHAIN[0], 0, 1)
    await old.prepare()
    await old.load()
    await old.train(0, batch)
    digests = None
    for hop, text in enumerate(CHAIN[1:], 1):
        new = Group(six, smollm2, text, 6 - ranks_of(text) if hop % 2 else 0, hop + 1)
        await new.prepare()
        started = time.monotonic()
        report = await move(old, new, 1, Mode.SHADOW if hop % 2 else Mode.IN_PLACE, BUCKET_BYTES)
        print(f"{CHAIN[hop - 1]} -> {text}: {time.monotonic() - started:.1f} s, {report}")
        assert report.bytes_moved == report.bytes_needed
        assert digests in (None, report.digests)
        digests = report.digests
        await new.commit(1)
        await old.release()
        old = new
    assert (await old.train(1, batch)).version == 2
    await old.release()


async def test_a_move_in_place_takes_no_more_than_the_larger_side_and_two_buckets(
    smollm2: Path, six: RankProcesses
) -> None:
    """An old and a new rank on one device: their processes' memory together, over what they take without any state."""
    bucket = program.BUCKET_BYTES  # one for the tensors of a round, one for what the transport stages
    old, new = Group(six, smollm2, "tp1.pp1.fs1", 0, 11), Group(six, smollm2, "tp1.pp1.fs1", 3, 12)
    try:
        await new.prepare()
        await old.prepare()
        device = DeviceId("node0", "cpu0")
        pids = {device: [*old.units[0].host.pids, *new.units[0].host.pids]}
        with Peaks(pids) as idle:
            await asyncio.sleep(0.5)
        await old.load()
        await old.train(0, make_batch(groups=2, per_group=2))
        await old.units[0].offer(1, 60.0)
        with Peaks(pids) as before:
            await asyncio.sleep(0.5)
        with Peaks(pids) as during:
            report = await move(old, new, 1, Mode.IN_PLACE, bucket)
        sizes = [await state_bytes(old), await state_bytes(new)]
        mib = 1 << 20
        seen = [f"{one.bytes[device] / mib:.0f}" for one in (idle, before, during)]
        states = [round(size / mib) for size in sizes]
        print(f"idle, offered, peak {seen}, states {states} MiB, {report.rounds} rounds")
        assert during.bytes[device] - idle.bytes[device] <= max(sizes) + 2 * bucket
    finally:
        await old.release()
        await new.release()


async def state_bytes(group: Group) -> int:
    """Of all ranks of a unit."""
    holding = await group.units[0].describe(9.0, state=True)
    return sum(4 * box.elements for rank in holding.ranks for region in rank.boxes.values() for box in region)
